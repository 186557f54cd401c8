"""Shows the state of a run: redrawn lines at a terminal, and a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from barnraise.agent_client.run_requests import TrainingProgress, WatchResponse
from barnraise.cli.runs.progress.live_line import LiveLines, cut, is_live_terminal, terminal_columns
from barnraise.cli.runs.progress.progress_line import is_overdue, join_parts, progress_parts
from barnraise.cli.runs.progress.waiting_line import awaited, stall_reason, waiting_line
from barnraise.cli.terminal import painted
from barnraise.core.flow.wait_reporter import WaitReporter
from barnraise.core.sanitize import printable

PREFIX = "barnraise: "
_PLAIN_S = 5.0  # between two lines where no line can be redrawn
_MAX_PLAIN_S = 60.0
_FIRST_WAIT_S = 2.0
_PLAIN_WIDTH = 80
_MAX_BARS = 8
_LIVE_PATIENCE_S, _PLAIN_PATIENCE_S = 2.0, 10.0  # until a step counts as overdue
_STALLED = "no step"


def _progress_due() -> WaitReporter:
    return WaitReporter(_PLAIN_S, _PLAIN_S, max_interval_s=_MAX_PLAIN_S)


class WaitCadence:
    """Times of the plain lines about a wait: after 2 s, then every 5 s with news, and more seldom without."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unchanged = WaitReporter(_FIRST_WAIT_S, _PLAIN_S, max_interval_s=_MAX_PLAIN_S, clock=clock)
        self._text, self._printed_at = "", clock()

    @property
    def waited_s(self) -> float:
        """Return the seconds since the wait started."""
        return self._unchanged.waited_s

    def is_due(self, text: str) -> bool:
        """Return True if the text is to be printed now; then the caller prints it."""
        is_news = bool(self._text) and text != self._text and self._clock() - self._printed_at >= _PLAIN_S
        if not text or not (self._unchanged.is_due() or is_news):
            return False
        self._text, self._printed_at = text, self._clock()
        return True


@dataclass(frozen=True)
class OutputBar:
    """Unfinished line of a worker's output, such as a progress bar. ``colour``: of the machine's label."""

    worker: int
    label: str
    colour: str
    text: str
    is_rewritten: bool


@dataclass
class StatusView:
    """Status of one run at the bottom of the view. Call `erase` before each printed line."""

    live: LiveLines | None = field(default_factory=lambda: LiveLines() if is_live_terminal() else None)
    progress: TrainingProgress | None = None
    stepped_at: float = 0.0  # when ``progress`` changed
    has_output: bool = False  # the script has printed something
    shows_bars_only: bool = False
    _stage: tuple[object, ...] = ()
    _wait: WaitCadence = field(default_factory=WaitCadence)
    _stall: WaitCadence = field(default_factory=WaitCadence)  # since the newest step
    _progress_due: WaitReporter = field(default_factory=_progress_due)
    _bars_due: dict[int, WaitReporter] = field(default_factory=dict)
    _printed_bars: dict[int, str] = field(default_factory=dict)

    def erase(self) -> None:
        """Remove the redrawn lines from the terminal."""
        if self.live is not None:
            self.live.erase()

    def was_printed(self, worker: int, line: str) -> bool:
        """Tell whether a line that is complete now was already printed while it was unfinished."""
        return self._printed_bars.pop(worker, None) == line

    def show(
        self,
        response: WatchResponse,
        bars: Sequence[OutputBar],
        say: Callable[[str], None],
        echo: Callable[[str], None],
    ) -> None:
        """Show how far the run is. ``say`` prints a line of ours, ``echo`` one of the script."""
        is_new = self._note(response)
        if self.live is not None:
            width = terminal_columns() - 1
            status = self._status(response, width - len(PREFIX))
            own = [painted(cut(PREFIX + status, width), dim=True, err=True)] if status else []
            self.live.draw([*(_drawn(bar, width) for bar in bars[:_MAX_BARS] if bar.text), *own])
            return
        for bar in bars:
            self._print_bar(bar, echo)
        if self._is_due(response, is_new=is_new):
            say(self._status(response, _PLAIN_WIDTH - len(PREFIX)))

    def _is_due(self, response: WatchResponse, *, is_new: bool) -> bool:
        """Tell whether it is time for a plain line."""
        if self.shows_bars_only:
            return False
        if response.row.phase == "running" and self.progress is not None:
            if is_overdue(self.progress, time.monotonic() - self.stepped_at):
                return self._stall.is_due(_STALLED)
            return is_new and self._progress_due.is_due()
        # A script without a session tells by its own output that it runs.
        is_quiet = self.has_output and not any(worker.has_session for worker in response.workers)
        return not is_quiet and self._wait.is_due(awaited(response, has_output=self.has_output))

    def _note(self, response: WatchResponse) -> bool:
        """Note the newest facts; return True if there is a new step."""
        stage = (response.row.phase, response.row.generation)
        if stage != self._stage:
            self._stage, self._wait = stage, WaitCadence()
        newest, last = response.row.progress, self.progress
        is_new = newest is not None and (last is None or newest.step != last.step)
        if is_new:
            self.progress, self.stepped_at = newest, time.monotonic()
            self._stall = WaitCadence()
        return is_new

    def _status(self, response: WatchResponse, width: int) -> str:
        return printable(self._own_text(response, width))

    def _own_text(self, response: WatchResponse, width: int) -> str:
        row = response.row
        if self.shows_bars_only:
            return ""
        if row.phase == "running" and self.progress is not None:
            silent_s = time.monotonic() - self.stepped_at
            reason = stall_reason(response.workers)
            patience_s = _PLAIN_PATIENCE_S if self.live is None else _LIVE_PATIENCE_S
            parts = progress_parts(
                self.progress, len(row.machines), silent_s, reason=reason, patience_s=patience_s
            )
            return join_parts(parts, width)
        text = awaited(response, has_output=self.has_output)
        return waiting_line(text, self._wait.waited_s, width) if text else ""

    def _print_bar(self, bar: OutputBar, echo: Callable[[str], None]) -> None:
        """Print a progress bar of the script as a line, every few seconds."""
        if not bar.is_rewritten or not bar.text or self._printed_bars.get(bar.worker) == bar.text:
            return
        if self._bars_due.setdefault(bar.worker, _progress_due()).is_due():
            self._printed_bars[bar.worker] = bar.text
            echo(f"{bar.label} {bar.text}".lstrip())


def _drawn(bar: OutputBar, width: int) -> str:
    label = cut(bar.label, width)
    text = cut(bar.text, width - len(label) - 1)
    return f"{painted(label, colour=bar.colour, err=True)} {text}" if label else text
