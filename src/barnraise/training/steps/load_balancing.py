"""Which units of a step this member computes, by what is known of everybody's speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from barnraise.core.errors import ProtocolError
from barnraise.runs.sharding import MicroBatch, assign_micro_batches
from barnraise.training.steps.throughput import Throughput

log = logging.getLogger("barnraise.training")

Leased = tuple[tuple[int, ...], ...]  # numbers of units by rank
Leasing = Callable[
    [Sequence[MicroBatch], Mapping[int, frozenset[int]], Sequence[float], frozenset[int]], Leased
]


def deal(
    units: Sequence[MicroBatch],
    claimed: Mapping[int, frozenset[int]],
    pace: Throughput,
    world: int,
    mine: int,
) -> list[MicroBatch]:
    """Of those that nobody has ``claimed``; the same on all members. Says who gets none."""
    shares = shares_of(pace, world)
    dealt, idle = deal_to_all(units, claimed, pace, world)
    for rank in idle:
        if mine in (0, rank):
            log.warning(
                "member %d is too slow to be waited for (%.3g samples/s, all together %.3g): it gets no "
                "units for a while, and is tried again",
                rank,
                shares[rank],
                sum(shares),
            )
    return [units[number] for number in dealt[mine]]


def deal_to_all(
    units: Sequence[MicroBatch],
    claimed: Mapping[int, frozenset[int]],
    pace: Throughput,
    world: int,
    leasing: Leasing = assign_micro_batches,
) -> tuple[Leased, list[int]]:
    """What each rank has to compute, and the ranks that are too slow to have any, when that begins."""
    if any(not 0 <= number < len(units) for some in claimed.values() for number in some):
        raise ProtocolError("a member has computed units that the step does not have")
    dealt = leasing(units, claimed, shares_of(pace, world), pace.due(world))
    counts = [len(dealt[rank]) + len(claimed.get(rank, ())) for rank in range(world)]
    return dealt, pace.dealt(counts) if len(units) >= world else []


def shares_of(pace: Throughput, world: int) -> Sequence[float]:
    """The same for each, as long as speeds are not known."""
    return pace.shares if len(pace.shares) == world else [1.0] * world
