"""Restores the state of the rounds from the log after a restart. Pure."""

from __future__ import annotations

from barnraise.hub.protocol.messages import HubDataOrder
from barnraise.hub.rounds.leases import renew
from barnraise.hub.rounds.persistent_map import LeaseTable, PersistentMap
from barnraise.hub.rounds.sample_pool import SamplePool
from barnraise.hub.rounds.state_machine import RoundState
from barnraise.hub.storage.create import HubFounding
from barnraise.hub.storage.log import HubSnapshot, read_fact


def restore_state(found: HubSnapshot, founding: HubFounding, now: float, *, is_region: bool) -> RoundState:
    """Return the state that the log describes. Every lease gets its whole time again."""
    course = read_fact(found.facts, "course", HubDataOrder)
    if is_region and course is not None:  # its parent leases them again
        pool = SamplePool(course.samples * course.epochs)
    else:
        pool = read_fact(found.facts, "pool", SamplePool) or SamplePool()
    return RoundState(
        terms=founding.terms,
        course=course,
        version=found.versions[-1].number if found.versions else None,
        pool=pool,
        lent=LeaseTable({one.id: renew(one, founding.terms, now) for one in found.leases}),
        waiting=PersistentMap({one.update.id: one.update for one in found.arrivals}),
        delivered=PersistentMap({one.update.node: one.update.id for one in found.arrivals}),
        is_region=is_region,
        usual=PersistentMap({node: one.usual for node, one in found.members.items() if one.usual}),
        since=now,
        known=sum(one.norm > 0 for one in found.seen),
    )


def covered_samples(found: HubSnapshot, state: RoundState) -> int:
    """Return the number of samples in committed versions.

    A hub that took over does not know the first versions, so it subtracts free, leased and pending samples.
    """
    if state.is_region:
        return sum(one.samples for one in found.versions)
    free = sum(span.size for span in state.pool.returned)
    lent = sum(one.samples for one in state.lent.values())
    return state.pool.cursor - free - lent - sum(one.samples for one in state.waiting.values())
