"""Plain lines about a run where no screen can be drawn: what is now, then only what is new."""

from __future__ import annotations

import time
from collections.abc import Callable

from barnraise.cli.watch.lines import line, text_of
from barnraise.cli.watch.panels import clock_time, event_lines, progress_line
from barnraise.cli.watch.snapshot import Freshness, Snapshot, SnapshotSource, newest_entry_at
from barnraise.core.errors import BarnraiseError
from barnraise.history.view import RunView

_LOOK_S = 1.0
_PROGRESS_S = 10.0
_WIDTH = 200
_EVENT_LINES = 4


class PlainOutput:
    """Lines about one run that remember what was printed."""

    def __init__(self, echo: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._echo, self._clock = echo, clock
        self._headline, self._waits_for, self._stale, self._step = "", "", "", -1
        self._events = 0
        self._progress_at = float("-inf")
        self._newest_at, self._news_at = 0.0, clock()
        self._answered_at = clock()

    def show(self, snapshot: Snapshot) -> None:
        """Print what is new in a snapshot."""
        view, now = snapshot.view, self._clock()
        self._answered_at = now
        if newest_entry_at(view) != self._newest_at:
            self._newest_at, self._news_at = newest_entry_at(view), now
        self._say_changed("_headline", view.headline)
        for row in event_lines(view.events[self._events :], _WIDTH, clock_time, _EVENT_LINES):
            self._echo(text_of(row))
        self._events = len(view.events)
        self._say_changed("_waits_for", f"waiting: {snapshot.waits_for}" if snapshot.waits_for else "")
        if self._is_progress_due(view, now):
            self._step, self._progress_at = view.step, now
            self._echo(text_of(progress_line(view, _WIDTH)))
        self._say_stale(view, "")

    def failed(self, view: RunView, error: str) -> None:
        """Print that no answer came, once it is late."""
        self._say_stale(view, error)

    def _say_stale(self, view: RunView, error: str) -> None:
        now = self._clock()
        freshness = Freshness(now - self._answered_at, now - self._news_at, error)
        is_live = freshness.is_live(view)
        if is_live == bool(self._stale):
            self._stale = "" if is_live else freshness.sentence(view)
            self._echo(self._stale or "live again")

    def _is_progress_due(self, view: RunView, now: float) -> bool:
        is_new = view.step != self._step
        return is_new and (now - self._progress_at >= _PROGRESS_S or view.state != "running")

    def _say_changed(self, name: str, text: str) -> None:
        if text and text != getattr(self, name):
            self._echo(text_of(line(text)))
        setattr(self, name, text)


def follow(source: SnapshotSource, first: Snapshot, echo: Callable[[str], None]) -> RunView:
    """Print lines until the run has ended; return its last state."""
    output = PlainOutput(echo)
    snapshot = first
    output.show(snapshot)
    while snapshot.view.state == "running":
        time.sleep(_LOOK_S)
        try:
            snapshot = source.look()
        except BarnraiseError as error:
            output.failed(snapshot.view, error.message)
        else:
            output.show(snapshot)
    return snapshot.view
