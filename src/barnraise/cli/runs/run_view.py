"""Follows a run on the terminal: one calm view of all machines, and the output of the workers that matter."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import click

from barnraise.agent_client.cluster_requests import RequestDone
from barnraise.agent_client.log_tail import LogTail
from barnraise.agent_client.run_requests import (
    LARGEST_OFFSET,
    FollowPosition,
    RunRow,
    StopRunRequest,
    TrainingProgress,
    WatchRequest,
    WatchResponse,
    WorkerRow,
)
from barnraise.cli.agent_call import ask
from barnraise.cli.runs.live_line import LiveLines, cut, is_live_terminal, terminal_columns
from barnraise.cli.runs.progress_line import join_parts, progress_parts
from barnraise.cli.terminal import painted
from barnraise.core.errors import AgentError
from barnraise.core.flow.console_log import split_prefix
from barnraise.core.flow.wait_reporter import WaitReporter
from barnraise.core.units import format_size

_PREFIX = "barnraise: "
_WAIT_S = 1.0
_PLAIN_S = 5.0  # between two lines about progress where no line can be redrawn
_MAX_PLAIN_S = 60.0
_PLAIN_WIDTH = 80
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
_AWAY_S = 60.0  # how long this machine's agent may be silent before the view gives up


@dataclass
class RunView:
    """View of one run that remembers what it printed, so that nothing is printed twice."""

    all_ranks: bool
    echo: Callable[[str], None] = click.echo
    version: int = 0
    shown: set[str] = field(default_factory=set)
    last_shown: str = ""
    following: LogTail = field(default_factory=LogTail)
    shown_progress: float = field(default_factory=time.monotonic)
    live: LiveLines | None = field(default_factory=lambda: LiveLines() if is_live_terminal() else None)
    progress: TrainingProgress | None = None
    stepped_at: float = 0.0  # when ``progress`` changed
    plain_due: WaitReporter = field(
        default_factory=lambda: WaitReporter(_PLAIN_S, _PLAIN_S, max_interval_s=_MAX_PLAIN_S)
    )

    def follow(self, response: WatchResponse | None) -> tuple[FollowPosition, ...]:
        """Return what to ask for next: the output of rank 0, or of every rank.

        If another worker becomes rank 0 during a session, its earlier lines are not shown. It is asked for
        once its machine has reported where its lines as rank 0 begin.
        """
        if response is None or not response.workers:
            return ()
        starts = dict.fromkeys(self.numbers(response), 0)
        if self.following.has_started and not self.all_ranks:
            for worker in response.workers:
                if worker.number in starts and worker.start < response.row.generation:
                    starts[worker.number] = worker.main_offset
                    if worker.main_offset < 0 and response.row.phase == "ended":
                        starts[worker.number] = LARGEST_OFFSET
        return self.following.wanted({number: start for number, start in starts.items() if start >= 0})

    def numbers(self, response: WatchResponse) -> list[int]:
        """Return the workers whose output is shown."""
        if self.all_ranks:
            return [worker.number for worker in (*response.past, *response.workers)]
        return [worker.number for worker in response.workers if worker.rank == 0]

    def show(self, response: WatchResponse) -> None:
        self._show_progress(response)
        for line in response.findings if response.workers else ():
            self.say(line)
        for name, why in response.row.left_out:
            self.say(f"{name} takes no part: {why}")
        self.print_heard(response)
        if response.row.version != self.version:
            self.version = response.row.version
            if response.row.phase not in ("preparing", "ended"):
                words = response.row.sentence
                self.say(
                    words if response.row.phase == "running" else f"{response.row.phase}: {words}", again=True
                )
        self._show_status(response)

    def close(self) -> None:
        """Remove the redrawn lines from the terminal."""
        if self.live is not None:
            self.live.erase()

    def print_heard(self, response: WatchResponse) -> None:
        for note in response.notes:
            self.say(note)
        workers = {worker.number: worker for worker in (*response.past, *response.workers)}
        for number, line in self.following.heard(response):
            self._print_line(workers.get(number), len(workers), line)
        for number in self.following.missing():
            if response.row.phase == "ended" and number in workers:
                name = workers[number].name
                self.say(f"{name} does not answer; the output of its worker is there")

    def _show_progress(self, response: WatchResponse) -> None:
        if response.row.phase != "preparing" or time.monotonic() - self.shown_progress < 2.0:
            return
        for part in response.parts:
            if part.stage == "fetching" and part.all_bytes > (4 << 20):
                share = f"{format_size(part.done_bytes)} of {format_size(part.all_bytes)}"
                self.say(f"{part.name} receives {share}")
            elif part.stage == "asks":
                self.say(
                    f"waiting for {part.name}, a guest: "
                    f"its user must run `barnraise accept {response.row.run}`"
                )
            elif part.stage in ("building", "fetching", "waiting"):
                self.say(f"{part.name}: {part.words or part.stage}")
        self.shown_progress = time.monotonic()

    def _show_status(self, response: WatchResponse) -> None:
        """Show the line about the run's progress, or print it now and then."""
        newest, last = response.row.progress, self.progress
        is_new = newest is not None and (last is None or newest.step != last.step)
        if is_new:
            self.progress, self.stepped_at = newest, time.monotonic()
        if self.live is not None:
            width = terminal_columns() - 1
            status = self._status(response, width - len(_PREFIX))
            self.live.draw([painted(cut(_PREFIX + status, width), dim=True, err=True)] if status else [])
        elif is_new and self.plain_due.is_due():
            self._print_own(self._status(response, _PLAIN_WIDTH - len(_PREFIX)))

    def _status(self, response: WatchResponse, width: int) -> str:
        if response.row.phase != "running" or self.progress is None:
            return ""
        silent_s = time.monotonic() - self.stepped_at
        return join_parts(progress_parts(self.progress, len(response.row.machines), silent_s), width)

    def say(self, text: str, *, again: bool = False) -> None:
        """Print a line on stderr, so that the script's own output stays clean."""
        if (again and text != self.last_shown) or text not in self.shown:
            self.shown.add(text)
            self.last_shown = text
            self._print_own(text)

    def _print_own(self, text: str) -> None:
        self.close()
        click.echo(painted(_PREFIX + text, dim=True, err=True), err=True)

    def _print_line(self, worker: WorkerRow | None, count: int, line: str) -> None:
        self.close()
        if worker is None or count == 1:
            self.echo(line)
            return
        is_named = self.all_ranks and worker.rank >= 0
        label = f"{worker.name}:{worker.rank}" if is_named else worker.name
        is_ours, text = split_prefix(line)
        if is_ours:
            self.echo(click.style(f"{_PREFIX}{label}: {text}", dim=True))
            return
        colour = _COLOURS[worker.number % len(_COLOURS)]
        self.echo(f"{painted(label, colour=colour)} {line}")


def watch(run: str, *, all_ranks: bool, stops: bool, echo: Callable[[str], None] = click.echo) -> RunRow:
    """Watch a run until it stops. With ``stops``, Ctrl-C stops the run, twice kills it; else it only
    detaches.
    """
    view = RunView(all_ranks, echo)
    try:
        return _watch_until_end(run, view, stops=stops)
    finally:
        view.close()


def _watch_until_end(run: str, view: RunView, *, stops: bool) -> RunRow:
    response: WatchResponse | None = None
    interrupts, reported_interrupts, away_since = 0, 0, 0.0
    while True:
        try:
            try:
                if interrupts > reported_interrupts:
                    ask(StopRunRequest(run, hard=interrupts > 1), RequestDone, offer_start=False)
                    reported_interrupts = interrupts
                response = _ask(run, view, response)
                away_since = 0.0
                view.show(response)
                if response.row.phase == "ended" and view.following.is_complete(view.numbers(response)):
                    return response.row
            except AgentError as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > _AWAY_S:
                    raise
                view.say(f"this machine's agent does not answer, waiting for it: {error.message}")
                time.sleep(0.5)
        except KeyboardInterrupt:  # anywhere above: the agent may be slow to hear of the first one
            interrupts += 1
            view.close()
            if not stops:
                click.echo(f"\nThe run continues. Watch it again with: barnraise attach {run}", err=True)
                sys.exit(0)
            if interrupts > 2:
                click.echo(f"\nThe run may still be stopping. See its state: barnraise ps {run}", err=True)
                sys.exit(130)
            words = "stopping; Ctrl-C again kills it immediately" if interrupts == 1 else "killing it"
            click.echo(f"\nbarnraise: {words}", err=True)


def _ask(run: str, view: RunView, response: WatchResponse | None) -> WatchResponse:
    version = response.row.version if response is not None else 0
    question = WatchRequest(run=run, version=version, follow=view.follow(response), live=True, wait_s=_WAIT_S)
    return ask(question, WatchResponse, offer_start=False)
