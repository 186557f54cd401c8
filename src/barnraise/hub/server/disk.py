"""Whether the disk of a hub is slow, by how long its log waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

SLOW_S = 1.0  # a usual disk syncs in some hundredths of this, also an old one
_STUCK_S = 5.0  # a single commit that takes so long is enough
_SLOW_ONES, _QUICK_ONES = 3, 5  # one after the other, before it is called slow, and well again


class DiskLatency:
    """The thread that writes says when a commit begins and ends; anybody may ask."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: float | None = None
        self._slow: list[float] = []  # the seconds of the last ones, without a break
        self._quick = 0
        self._is_slow = False
        self.on_commit: Callable[[float], None] = lambda _: None

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> None:
        assert self._began is not None
        took = self._now() - self._began
        self._began = None
        if took >= SLOW_S:
            self._slow, self._quick = [*self._slow, took][-_SLOW_ONES:], 0
        else:
            self._slow, self._quick = [], self._quick + 1
        if len(self._slow) >= _SLOW_ONES or took >= _STUCK_S:
            self._is_slow = True
        elif self._quick >= _QUICK_ONES:
            self._is_slow = False
        self.on_commit(took)

    def slow_s(self) -> float | None:
        """How long a commit takes now, if the disk is slow. None if it is not."""
        began = self._began
        waits = 0.0 if began is None else self._now() - began
        if not self._is_slow and waits < _STUCK_S:
            return None
        return max([SLOW_S, waits, *self._slow])
