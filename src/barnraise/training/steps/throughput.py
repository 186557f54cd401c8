"""How fast each member is, so that shares follow it: samples per second of its own work, without waiting.

A member so slow that the others finish the step before it could compute one unit gets none, and is tried
again after a while: it may have been busy with something else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

_MEMORY = 0.5  # of what was known before, at each commit
_FIRST_TRIAL = 16  # commits without a unit
_LAST_TRIAL = 1024


class Throughput:
    """Of this member measured, of the others told."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self._speed = 0.0  # 0: not known yet
        self._busy_s = 0.0
        self._waited_s = 0.0  # for others inside optimizer.step(), and for what leaves during backward()
        self._samples = 0
        self._began = 0.0
        self._idle: list[int] = []  # commits since each member had a unit
        self._trials: list[int] = []  # after how many it is tried again

    def begin_unit(self) -> None:
        self._began = time.monotonic() - self._waited_s

    def end_unit(self, samples: int) -> None:
        self._busy_s += time.monotonic() - self._waited_s - self._began
        self._samples += samples

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def speed(self) -> float:
        """0: not known yet."""
        return self._samples / self._busy_s if self._busy_s > 0 else self._speed

    @property
    def is_known(self) -> bool:
        """Whether every member's speed is."""
        return bool(self.shares) and all(self.shares)

    def learn(self, speeds: Sequence[float], mine: int) -> None:
        """What every member said of itself at a commit."""
        if len(self.shares) == len(speeds):
            pairs = zip(self.shares, speeds, strict=True)
            self.shares = [_MEMORY * old + (1 - _MEMORY) * new if new else old for old, new in pairs]
        elif all(speeds):
            self.shares = list(speeds)
        if self._samples:
            self._speed = speeds[mine]
        self._busy_s, self._samples = 0.0, 0

    def begin_group(self, speeds: Sequence[float]) -> None:
        """With its members' speeds; none: nobody knows anything yet."""
        self.shares = list(speeds)
        self._idle, self._trials = [], []

    def due(self, world: int) -> frozenset[int]:
        """Members who have had nothing to do for so long that they are tried again. The same for all."""
        self._expect(world)
        return frozenset(rank for rank in range(world) if self._idle[rank] >= self._trials[rank])

    def dealt(self, counts: Sequence[int]) -> list[int]:
        """How many units each member has in the next step; returns those who have none for the first time."""
        self._expect(len(counts))
        idle = []
        for rank, count in enumerate(counts):
            if count:
                if self._idle[rank]:
                    self._trials[rank] = min(2 * self._trials[rank], _LAST_TRIAL)
                self._idle[rank] = 0
            else:
                self._idle[rank] += 1
                if self._idle[rank] == 1 and self._trials[rank] == _FIRST_TRIAL:
                    idle.append(rank)
        return idle

    def _expect(self, world: int) -> None:
        if len(self._idle) != world:
            self._idle, self._trials = [0] * world, [_FIRST_TRIAL] * world
