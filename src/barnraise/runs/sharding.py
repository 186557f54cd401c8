"""Sample sharding: the samples of a step, its micro-batches, and their assignment to workers. Pure.

The order of the samples is a function of seed and epoch alone. A step covers the next ``batch`` positions of
that order. They are cut into micro-batches of a fixed size; the last one of a step may be smaller.

A micro-batch is the smallest thing that is assigned, computed, counted and repeated. Its samples and its
random numbers do not depend on the worker that computes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class MicroBatch(NamedTuple):
    """Positions ``first`` (included) to ``last`` (excluded) of an epoch's order."""

    number: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first


def cut_micro_batches(first: int, last: int, size: int) -> tuple[MicroBatch, ...]:
    """Cut a range of positions into micro-batches."""
    starts = range(first, last, size)
    return tuple(MicroBatch(number, start, min(start + size, last)) for number, start in enumerate(starts))


class DataOrder(NamedTuple):
    """Parameters that define the order of all samples of a training."""

    samples: int
    batch: int
    micro_batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.batch)
        return whole if self.drop_last or not rest else whole + 1

    def locate_step(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step and the step's number within it, both counted from 0."""
        return divmod(step, self.steps_per_epoch)

    def steps_in_round(self, step: int, period: int) -> int:
        """Return the steps of a round that starts with this step; a round ends with its epoch."""
        _, within = self.locate_step(step)
        return min(period, self.steps_per_epoch - within)

    def may_overlap(self, step: int) -> bool:
        """Return True if the step is not the first of its epoch; between epochs the script may run other
        code.
        """
        return self.locate_step(step)[1] > 0

    def positions(self, step: int, period: int = 1) -> tuple[int, int]:
        """Return the range of positions that a step, or a round of steps, covers."""
        _, within = self.locate_step(step)
        first = within * self.batch
        return first, min(first + self.steps_in_round(step, period) * self.batch, self.samples)

    def micro_batches(self, step: int, period: int = 1) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of a step, or of a round of steps."""
        return cut_micro_batches(*self.positions(step, period), self.micro_batch_size)

    def sample_order(self, epoch: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]:
        """Return the samples of an epoch by position; equal on every machine and in every version."""
        if not self.shuffle:
            return numpy.arange(self.samples, dtype=numpy.int64)
        # Philox is specified bit by bit; argsort of 64 random bits is a shuffle without rejection.
        key = numpy.array([self.seed & _MASK, epoch], dtype=numpy.uint64)
        stream = numpy.random.Generator(numpy.random.Philox(key=key))
        keys = stream.integers(0, 1 << 63, size=self.samples, dtype=numpy.uint64)
        return numpy.argsort(keys, kind="stable").astype(numpy.int64)


def micro_batch_seed(seed: int, step: int, number: int, purpose: int = 0) -> int:
    """Return the random seed of a micro-batch; it depends on its position, not on the worker."""
    value = seed & _MASK
    for part in (step, number, purpose):
        value = (value ^ (part & _MASK)) * _MIX & _MASK
        value ^= value >> 29
        value = value * 0xBF58476D1CE4E5B9 & _MASK
        value ^= value >> 32
    return value & ((1 << 63) - 1)


def coverage_sum(numbers: Iterable[int]) -> int:
    """Return a checksum that shows whether every micro-batch was computed exactly once.

    The sums of all members add up to the sum of all micro-batches exactly in that case.
    """
    return sum(micro_batch_seed(0, 0, number) for number in numbers) & _MASK >> 1


def assign_micro_batches(
    micro_batches: Sequence[MicroBatch],
    claimed: Mapping[int, frozenset[int]],
    shares: Sequence[float],
    tried: frozenset[int] = frozenset(),
) -> tuple[tuple[int, ...], ...]:
    """Return for each member the numbers of the micro-batches that it has still to compute.

    ``claimed``: micro-batches that members have computed already; they keep them. The others are assigned so
    that the samples of each member come close to its share. A member in ``tried`` gets at least one, to
    measure its speed. The same input gives the same assignment everywhere.
    """
    taken = [number for numbers in claimed.values() for number in numbers]
    if len(taken) != len(set(taken)):
        raise ValueError("a micro-batch is claimed twice")
    sizes = {batch.number: batch.size for batch in micro_batches}
    load = [float(sum(sizes[number] for number in claimed.get(member, ()))) for member in range(len(shares))]
    assigned: list[list[int]] = [[] for _ in shares]
    claimed_numbers = set(taken)
    weights = [max(share, 1e-9) for share in shares]
    waiting = sorted(member for member in tried if not claimed.get(member))
    for batch in micro_batches:
        if batch.number in claimed_numbers:
            continue
        # The member that would finish first with this micro-batch added.
        soonest = min(range(len(weights)), key=lambda rank: ((load[rank] + batch.size) / weights[rank], rank))
        member = waiting.pop(0) if waiting else soonest
        load[member] += batch.size
        assigned[member].append(batch.number)
    return tuple(map(tuple, assigned))
