"""Time that passes only when somebody turns it: what is to happen, in its order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class FakeClock:
    """Things at the same moment happen in the order in which they were asked for."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action))

    def run(self, seconds: float) -> None:
        """So much time passes."""
        end = self.now + seconds
        queue = self._queue
        while queue and queue[0][0] <= end:
            self.now, _, action = heapq.heappop(queue)
            action()
        self.now = end

    def run_until(self, truth: Callable[[], bool]) -> None:
        """As long as something is to happen and it is not true."""
        queue = self._queue
        while queue and not truth():
            self.now, _, action = heapq.heappop(queue)
            action()
