"""Scarce resources of a hub on the fake clock: its processor, its line, its disk, its upload slots.

Each serves requests first come, first served. Links that streams share fairly (`network`) would cost a step
for every stream at every change. Thousands of members pull from a hub at the same moment, so that is too
slow. The bytes that a line has carried when all are done, and that time, are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from benchmarks.simulation.fake_clock import FakeClock

Then = Callable[[], None]
_BYTES_PER_MBIT = 1e6 / 8


class Processor:
    """A process on some cores, with one event loop that works on one of them at a time."""

    def __init__(self, clock: FakeClock, cores: list[float]) -> None:
        """Create a processor; ``cores``: when each is free; processes of one machine share them."""
        self._clock, self._free = clock, cores
        self._loop_free = 0.0
        self.loop_s = self.busy_s = 0.0

    def loop(self, seconds: float, then: Then) -> None:
        """Run work on the event loop."""
        self._loop_free = self._work(self._loop_free, seconds, then)
        self.loop_s += seconds

    def thread(self, seconds: float, then: Then) -> None:
        """Run work of a thread on the first free core."""
        self._work(0.0, seconds, then)

    def spread(self, seconds: float, then: Then) -> None:
        """Spread work over all cores at once."""
        end = max(self._clock.now, *self._free) + seconds / len(self._free)
        self._free[:] = [end] * len(self._free)
        self.busy_s += seconds
        self._clock.later(end - self._clock.now, then)

    def _work(self, earliest: float, seconds: float, then: Then) -> float:
        begin = max(self._clock.now, earliest, min(self._free))
        # The core that became free last, so that the other cores stay free for earlier work.
        core = self._free.index(max(free for free in self._free if free <= begin))
        self._free[core] = end = begin + seconds
        self.busy_s += seconds
        self._clock.later(end - self._clock.now, then)
        return end


class Line:
    """One direction of a hub's line. A member's own may be slower."""

    def __init__(self, clock: FakeClock, mbps: float) -> None:
        self._clock, self._rate, self._free = clock, mbps * _BYTES_PER_MBIT, 0.0
        self.carried = 0.0

    def carry(self, size: float, member_mbps: float, then: Then) -> None:
        now = self._clock.now
        self._free = max(now, self._free) + size / self._rate
        self.carried += size
        slow = now + size / (member_mbps * _BYTES_PER_MBIT)
        self._clock.later(max(self._free, slow) - now, then)

    def busy_s(self) -> float:
        return self.carried / self._rate


class Places:
    """Limited number of slots; further requests wait in their order."""

    def __init__(self, clock: FakeClock, count: int) -> None:
        self._clock, self._count, self._free = clock, count, count
        self._waiting: deque[Then] = deque()
        self._taken_s, self._since = 0.0, 0.0

    def enter(self, then: Then) -> None:
        if self._free:
            self._note()
            self._free -= 1
            then()
        else:
            self._waiting.append(then)

    def leave(self) -> None:
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._note()
            self._free += 1

    def busy_s(self) -> float:
        """Return the busy seconds as if it were one slot."""
        self._note()
        return self._taken_s / self._count

    def _note(self) -> None:
        self._taken_s += (self._count - self._free) * (self._clock.now - self._since)
        self._since = self._clock.now


class Journal:
    """A log that takes all that waits into one sync of the disk, as the hub's writer does."""

    def __init__(self, clock: FakeClock, sync_s: float) -> None:
        self._clock, self._sync_s = clock, sync_s
        self._waiting: list[Then] = []
        self._is_busy = False
        self.syncs = 0

    def write(self, then: Then) -> None:
        self._waiting.append(then)
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        batch, self._waiting = self._waiting, []
        self._is_busy = True
        self.syncs += 1
        self._clock.later(self._sync_s, lambda: self._end(batch))

    def _end(self, batch: list[Then]) -> None:
        self._is_busy = False
        for then in batch:
            then()
        if self._waiting and not self._is_busy:
            self._begin()
