"""Which samples a step covers, in which units they are computed, and who computes which. Pure.

The order of the samples is a function of (seed, epoch) alone. A step covers the next ``batch`` positions of
that order, cut into units: canonical micro-batches of a fixed size, the last one of a step possibly smaller.
A unit is what is leased, computed, counted and repeated; nothing smaller has a name. Who computes it changes
neither its samples nor its randomness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class MicroBatch(NamedTuple):
    """Positions ``first`` to ``last`` (without it) of an epoch's order."""

    number: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first


def cut_micro_batches(first: int, last: int, size: int) -> tuple[MicroBatch, ...]:
    """The units of a step that covers these positions."""
    starts = range(first, last, size)
    return tuple(MicroBatch(number, start, min(start + size, last)) for number, start in enumerate(starts))


class DataOrder(NamedTuple):
    """All that the order of a training depends on."""

    samples: int
    batch: int
    unit: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.batch)
        return whole if self.drop_last or not rest else whole + 1

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a step (both counted from 0), and its number within it."""
        return divmod(step, self.steps_per_epoch)

    def steps(self, step: int, period: int) -> int:
        """Of a round that begins with this step: none goes beyond its epoch."""
        _, within = self.place(step)
        return min(period, self.steps_per_epoch - within)

    def may_go_ahead(self, step: int) -> bool:
        """Within an epoch: between two of them the script may do something else."""
        return self.place(step)[1] > 0

    def span(self, step: int, period: int = 1) -> tuple[int, int]:
        """The positions in its epoch's order that a step, or a round of them, covers."""
        _, within = self.place(step)
        first = within * self.batch
        return first, min(first + self.steps(step, period) * self.batch, self.samples)

    def units(self, step: int, period: int = 1) -> tuple[MicroBatch, ...]:
        return cut_micro_batches(*self.span(step, period), self.unit)

    def order(self, epoch: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]:
        """The samples of an epoch by position; the same on every machine and in every version."""
        if not self.shuffle:
            return numpy.arange(self.samples, dtype=numpy.int64)
        # Philox is specified bit by bit; argsort of 64 random bits is a shuffle without rejection.
        key = numpy.array([self.seed & _MASK, epoch], dtype=numpy.uint64)
        stream = numpy.random.Generator(numpy.random.Philox(key=key))
        keys = stream.integers(0, 1 << 63, size=self.samples, dtype=numpy.uint64)
        return numpy.argsort(keys, kind="stable").astype(numpy.int64)


def micro_batch_seed(seed: int, step: int, unit: int, purpose: int = 0) -> int:
    """The randomness inside a unit: keyed by its position, so that it does not depend on who computes it."""
    value = seed & _MASK
    for part in (step, unit, purpose):
        value = (value ^ (part & _MASK)) * _MIX & _MASK
        value ^= value >> 29
        value = value * 0xBF58476D1CE4E5B9 & _MASK
        value ^= value >> 32
    return value & ((1 << 63) - 1)


def coverage_sum(units: Iterable[int]) -> int:
    """Those of several members add up to that of all units if each of them is there just once."""
    return sum(micro_batch_seed(0, 0, number) for number in units) & _MASK >> 1


def assign_micro_batches(
    units: Sequence[MicroBatch],
    claimed: Mapping[int, frozenset[int]],
    shares: Sequence[float],
    tried: frozenset[int] = frozenset(),
) -> tuple[tuple[int, ...], ...]:
    """For each member the units that it has still to compute.

    ``claimed`` are the units that members of this generation hold in their sums already; they keep them. The
    others are dealt so that each member's samples, with those it holds, come as close to its share as whole
    units allow; whoever is ``tried`` gets one at least. The same input gives the same answer everywhere.
    """
    taken = [one for units_of in claimed.values() for one in units_of]
    if len(taken) != len(set(taken)):
        raise ValueError("a unit is claimed twice")
    sizes = {unit.number: unit.size for unit in units}
    load = [float(sum(sizes[one] for one in claimed.get(member, ()))) for member in range(len(shares))]
    dealt: list[list[int]] = [[] for _ in shares]
    held = set(taken)
    weights = [max(share, 1e-9) for share in shares]
    waiting = sorted(member for member in tried if not claimed.get(member))
    for unit in units:
        if unit.number in held:
            continue
        # Whoever would be finished first if it took this one, too.
        soonest = min(range(len(weights)), key=lambda one: ((load[one] + unit.size) / weights[one], one))
        member = waiting.pop(0) if waiting else soonest
        load[member] += unit.size
        dealt[member].append(unit.number)
    return tuple(map(tuple, dealt))
