"""Retry loops: wait with a backoff between attempts, and report what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from barnraise.core.flow.backoff import Backoff, BackoffTimer
from barnraise.core.flow.wait_reporter import WaitReporter
from barnraise.core.sanitize import printable

SAY_AFTER_S = 10.0
_SAY_EVERY_S = 60.0
_BACKOFF = Backoff(0.5, 20.0, jitter=0.5)


class ReportedBackoff:
    """Backoff of one retry loop, reported after ten seconds and then once a minute.

    ``awaited``: the name of the peer or event that the loop waits for.
    """

    def __init__(
        self,
        awaited: str,
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._awaited, self._say, self._sleep = awaited, say, sleep
        self._reporter = WaitReporter(SAY_AFTER_S, _SAY_EVERY_S, clock=clock)
        self._timer = BackoffTimer(_BACKOFF)

    @property
    def waited_s(self) -> float:
        """Return the seconds since the loop started."""
        return self._reporter.waited_s

    def note(self, why: str) -> None:
        """Report the reason of the wait if a report is due."""
        if self._reporter.is_due():
            self._say(f"waiting for {self.waited_s:.0f} s for {self._awaited}: {printable(why)}")

    def pause(self, why: str, min_s: float = 0.0) -> None:
        """Sleep before the next attempt, at least ``min_s`` seconds."""
        self.note(why)
        self._sleep(max(min_s, self._timer.next_wait()))
