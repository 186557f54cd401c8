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
    RunChange,
    RunRow,
    StopRunRequest,
    WatchRequest,
    WatchResponse,
    WorkerRow,
)
from barnraise.cli.agent_call import ask
from barnraise.cli.runs.progress.status_view import PREFIX, OutputBar, StatusView
from barnraise.cli.runs.progress.waiting_line import part_line
from barnraise.cli.terminal import painted
from barnraise.core.errors import AgentError
from barnraise.core.flow.console_log import split_prefix
from barnraise.core.sanitize import printable

_WAIT_S = 1.0
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
_LAST_REPORT_S = 10.0  # how long the last report of a machine may take after the end of the run
_AGAIN_S = 0.1  # the agent answers at once when the run has ended
_AWAY_S = 60.0  # how long this machine's agent may be silent before the view gives up


@dataclass
class RunOutput:
    """View of one run that remembers what it printed, so that nothing is printed twice."""

    all_ranks: bool
    echo: Callable[[str], None] = click.echo
    version: int = 0
    shown: set[str] = field(default_factory=set)
    last_shown: str = ""
    following: LogTail = field(default_factory=LogTail)
    status: StatusView = field(default_factory=StatusView)
    names: set[str] = field(default_factory=set)  # machines of the run
    ended_at: float = 0.0  # when the end of the run was seen

    def follow(self, response: WatchResponse | None) -> tuple[FollowPosition, ...]:
        """Return what to ask for next: the output of rank 0, or of every rank.

        If another worker becomes rank 0 during a session, its earlier lines are not shown. It is asked for
        once its machine has reported where its lines as rank 0 begin. Without such a report it never was
        rank 0, or its machine is gone.
        """
        if response is None or not response.workers:
            return ()
        starts = dict.fromkeys(self.numbers(response), 0)
        if self.following.has_started and not self.all_ranks:
            has_ended = response.row.phase == "ended"
            self.ended_at = self.ended_at or (time.monotonic() if has_ended else 0.0)
            is_late = has_ended and time.monotonic() - self.ended_at > _LAST_REPORT_S
            for worker in (*response.past, *response.workers):
                if worker.number in starts and worker.start < response.row.generation:
                    starts[worker.number] = worker.main_offset
                    is_reported = worker.state == "ended" or is_late
                    if worker.main_offset < 0 and has_ended and is_reported:
                        starts[worker.number] = LARGEST_OFFSET
        return self.following.wanted({number: start for number, start in starts.items() if start >= 0})

    def numbers(self, response: WatchResponse) -> list[int]:
        """Return the workers whose output is shown.

        A worker may have been rank 0 for so short a time that it was not seen before others went on. Of a
        guest's worker that is not believed: the view would wait for its output.
        """
        if self.all_ranks:
            return [worker.number for worker in (*response.past, *response.workers)]
        earlier = response.past if self.following.has_started else ()
        return [
            *(worker.number for worker in earlier if worker.main_offset >= 0 and worker.is_trusted),
            *(worker.number for worker in response.workers if worker.rank == 0),
        ]

    def show(self, response: WatchResponse) -> None:
        for part in response.parts if response.row.phase == "preparing" else ():
            if part.stage == "asks":
                self.say(part_line(part, response.row.run))
        for line in response.findings if response.workers else ():
            self.say(line)
        for name, why in response.row.left_out:
            self.say(f"{name} takes no part: {why}")
        self.print_heard(response)
        self._show_changes(response.row)
        self.show_status(response)

    def _show_changes(self, row: RunRow) -> None:
        """Show why the run is as it is now, and the changes since the last look."""
        if row.version == self.version:
            return
        missed = [change for change in row.changes if 0 < self.version < change.version < row.version]
        for change in (*missed, RunChange(row.version, row.phase, row.sentence)):
            if change.phase not in ("preparing", "ended"):
                words = change.why if change.phase == "running" else f"{change.phase}: {change.why}"
                self.say(words, again=True)
        self.version = row.version

    def close(self) -> None:
        """Remove the redrawn lines from the terminal."""
        self.status.erase()

    def print_heard(self, response: WatchResponse) -> None:
        for note in response.notes:
            self.say(note)
        workers = {worker.number: worker for worker in (*response.past, *response.workers)}
        self.names |= {worker.name for worker in workers.values()}
        for number, line in self.following.heard(response):
            self._print_line(workers.get(number), len(workers), line)
        for number in self.following.missing():
            if response.row.phase == "ended" and number in workers:
                name = workers[number].name
                self.say(f"{name} does not answer; the output of its worker is there")

    def show_status(self, response: WatchResponse) -> None:
        """Show unfinished lines of the script, and how far the run is."""
        self.status.show(response, self._bars(response), self._print_own, self.echo)

    def print_bars(self, response: WatchResponse) -> None:
        """Print unfinished lines of the script as they are now."""
        for bar in self._bars(response):
            self.echo(f"{painted(bar.label, colour=bar.colour)} {bar.text}" if bar.label else bar.text)

    def _bars(self, response: WatchResponse) -> list[OutputBar]:
        workers = {worker.number: worker for worker in (*response.past, *response.workers)}
        bars = []
        for number, text, is_rewritten in self.following.open_lines():
            label, colour = self._label(workers.get(number), len(workers))
            bars.append(OutputBar(number, label, colour, text, is_rewritten))
        return bars

    def say(self, text: str, *, again: bool = False) -> None:
        """Print a line on stderr, so that the script's own output stays clean."""
        if (again and text != self.last_shown) or text not in self.shown:
            self.shown.add(text)
            self.last_shown = text
            self._print_own(text)

    def _print_own(self, text: str) -> None:
        self.close()
        click.echo(painted(PREFIX + printable(text), dim=True, err=True), err=True)

    def _print_line(self, worker: WorkerRow | None, count: int, line: str) -> None:
        if worker is not None and self.status.was_printed(worker.number, line):
            return
        self.close()
        self.status.has_output = True
        label, colour = self._label(worker, count)
        is_ours, text = split_prefix(line)
        if is_ours and label and worker is not None and worker.is_trusted:
            # Some messages begin with the machine that they are about.
            is_named = text.split(" ", 1)[0].rstrip(":") in self.names
            self.echo(painted(PREFIX + (text if is_named else f"{label}: {text}"), dim=True))
        else:
            self.echo(f"{painted(label, colour=colour)} {line}" if label else line)

    def _label(self, worker: WorkerRow | None, count: int) -> tuple[str, str]:
        """Return the name before the output of a worker, and its colour; empty if there is one worker.

        A worker that is not trusted is always named, so that its lines cannot look like ours.
        """
        if worker is None or (count == 1 and worker.is_trusted):
            return "", ""
        is_named = self.all_ranks and worker.rank >= 0
        label = f"{worker.name}:{worker.rank}" if is_named else worker.name
        return label, _COLOURS[worker.number % len(_COLOURS)]


def watch(run: str, *, all_ranks: bool, stops: bool, echo: Callable[[str], None] = click.echo) -> RunRow:
    """Watch a run until it stops. With ``stops``, Ctrl-C stops the run, twice kills it; else it only
    detaches.
    """
    view = RunOutput(all_ranks, echo)
    try:
        return _watch_until_end(run, view, stops=stops)
    finally:
        view.close()


def _watch_until_end(run: str, view: RunOutput, *, stops: bool) -> RunRow:
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
                if response.row.phase == "ended":
                    if view.following.is_complete(view.numbers(response)):
                        return response.row
                    time.sleep(_AGAIN_S)
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


def _ask(run: str, view: RunOutput, response: WatchResponse | None) -> WatchResponse:
    version = response.row.version if response is not None else 0
    question = WatchRequest(run=run, version=version, follow=view.follow(response), live=True, wait_s=_WAIT_S)
    return ask(question, WatchResponse, offer_start=False)
