"""Reports of long waits: now and then a line that says what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable


class WaitReporter:
    """Times at which a long wait is worth a line in the log.

    The first report is due after ``first_s``, each next one ``interval_s`` after the last. With
    ``max_interval_s`` the interval doubles up to this.
    """

    def __init__(
        self,
        first_s: float,
        interval_s: float,
        *,
        max_interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._started = clock()
        self._next = self._started + first_s
        self._interval_s, self._max_interval_s = interval_s, max_interval_s

    @property
    def waited_s(self) -> float:
        """Return the seconds since the wait started."""
        return self._clock() - self._started

    def is_due(self) -> bool:
        """Return True if a report is due; then the caller reports, and the next one is scheduled."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._interval_s
        if self._max_interval_s is not None:
            self._interval_s = min(self._max_interval_s, 2 * self._interval_s)
        return True
