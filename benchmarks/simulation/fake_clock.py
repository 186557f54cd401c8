"""Fake clock whose time passes only on request, with a queue of future actions in their order."""

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
        """Let this much time pass and run the actions that are due."""
        end = self.now + seconds
        queue = self._queue
        while queue and queue[0][0] <= end:
            self.now, _, action = heapq.heappop(queue)
            action()
        self.now = end

    def run_until(self, truth: Callable[[], bool]) -> None:
        """Run actions until the condition is true or no action is left."""
        queue = self._queue
        while queue and not truth():
            self.now, _, action = heapq.heappop(queue)
            action()
