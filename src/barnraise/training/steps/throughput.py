"""Throughput of each worker, for load balancing: samples per second of its own work, without waiting.

A worker that is slower with one micro-batch than the others with the whole step gets none. It is retried
after a while, because it may have been busy with something else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from barnraise.training.record.phase_clock import PhaseClock

_SMOOTHING = 0.5  # weight of the previous estimate, at each commit
_FIRST_RETRY = 16  # commits without a micro-batch
_LAST_RETRY = 1024


class Throughput:
    """Moving averages of all workers' speeds; this worker's own speed is measured here.

    ``speeds``: samples per second by rank. ``assigned``: micro-batches of the newest assigned step by rank.
    ``phases``: where the time since the last commit went.
    """

    def __init__(self) -> None:
        self.speeds: list[float] = []
        self.assigned: tuple[int, ...] = ()
        self.phases = PhaseClock()
        self._data_s = 0.0  # of the phase, when the micro-batch started
        self._own_speed = 0.0  # 0: unknown
        self._busy_s = 0.0
        self._waited_s = 0.0  # in optimizer.step() for other workers, and for sending during backward()
        self._samples = 0
        self._start = 0.0
        self._idle: list[int] = []  # commits since each rank had a micro-batch
        self._retry_after: list[int] = []  # idle commits after which each rank is retried

    def start_microbatch(self) -> None:
        """Start the clock for a micro-batch."""
        self._start = time.perf_counter() - self._waited_s
        self._data_s = self.phases.seconds("data")

    def finish_backward(self, sending_s: float) -> None:
        """Add the micro-batch to the phases of the step; ``sending_s``: for sending during backward()."""
        self.add_wait(sending_s)
        self.phases.add("communication", sending_s)
        data_s = self.phases.seconds("data") - self._data_s
        self.phases.add("compute", time.perf_counter() - self._waited_s - self._start - data_s)

    def finish_microbatch(self, samples: int) -> None:
        """Stop the clock and count the samples."""
        self._busy_s += time.perf_counter() - self._waited_s - self._start
        self._samples += samples

    def add_wait(self, seconds: float) -> None:
        """Exclude waiting time from the measurement."""
        self._waited_s += seconds

    @property
    def waited_s(self) -> float:
        """Return the total waiting time so far."""
        return self._waited_s

    def speed(self) -> float:
        """Return this worker's samples per second; 0 if unknown."""
        return self._samples / self._busy_s if self._busy_s > 0 else self._own_speed

    @property
    def is_known(self) -> bool:
        """Return True if every rank's speed is known."""
        return bool(self.speeds) and all(self.speeds)

    def update(self, speeds: Sequence[float], own_rank: int) -> None:
        """Update the averages with the speeds that all ranks reported with a commit."""
        if len(self.speeds) == len(speeds):
            pairs = zip(self.speeds, speeds, strict=True)
            self.speeds = [_SMOOTHING * old + (1 - _SMOOTHING) * new if new else old for old, new in pairs]
        elif all(speeds):
            self.speeds = list(speeds)
        if self._samples:
            self._own_speed = speeds[own_rank]
        self._busy_s, self._samples = 0.0, 0

    def start_group(self, speeds: Sequence[float]) -> None:
        """Set the speeds of a new group; empty if they are unknown."""
        self.speeds = list(speeds)
        self._idle, self._retry_after = [], []

    def ranks_to_retry(self, world: int) -> frozenset[int]:
        """Return the ranks that have been idle long enough to be retried; the same on all workers."""
        self._resize(world)
        return frozenset(rank for rank in range(world) if self._idle[rank] >= self._retry_after[rank])

    def note_assignment(self, counts: Sequence[int]) -> list[int]:
        """Note how many micro-batches each rank has. Return the ranks that have none for the first time."""
        self._resize(len(counts))
        idle = []
        for rank, count in enumerate(counts):
            if count:
                if self._idle[rank]:
                    self._retry_after[rank] = min(2 * self._retry_after[rank], _LAST_RETRY)
                self._idle[rank] = 0
            else:
                self._idle[rank] += 1
                if self._idle[rank] == 1 and self._retry_after[rank] == _FIRST_RETRY:
                    idle.append(rank)
        return idle

    def _resize(self, world: int) -> None:
        if len(self._idle) != world:
            self._idle, self._retry_after = [0] * world, [_FIRST_RETRY] * world
