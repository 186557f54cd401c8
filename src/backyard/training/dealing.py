"""Which units of a step this member computes, by what is known of everybody's speed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from backyard.core.errors import ProtocolError
from backyard.runs.leases import Unit, lease
from backyard.training.pace import Pace

log = logging.getLogger("backyard.training")


def deal(
    units: Sequence[Unit], claimed: Mapping[int, frozenset[int]], pace: Pace, world: int, mine: int
) -> list[Unit]:
    """Of those that nobody has ``claimed``; the same on all members. Says who gets none."""
    if any(not 0 <= number < len(units) for some in claimed.values() for number in some):
        raise ProtocolError("a member has computed units that the step does not have")
    shares = pace.shares if len(pace.shares) == world else [1.0] * world
    dealt = lease(units, claimed, shares, pace.due(world))
    counts = [len(dealt[rank]) + len(claimed.get(rank, ())) for rank in range(world)]
    for rank in pace.dealt(counts) if len(units) >= world else ():
        if mine in (0, rank):
            log.warning(
                "member %d is too slow to be waited for (%.3g samples/s, all together %.3g): it gets no "
                "units for a while, and is tried again",
                rank,
                shares[rank],
                sum(shares),
            )
    return [units[number] for number in dealt[mine]]
