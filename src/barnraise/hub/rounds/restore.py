"""Restores the state of the rounds from the log after a restart. Pure."""

from __future__ import annotations

from barnraise.hub.protocol.messages import HubDataOrder
from barnraise.hub.rounds.leases import renew
from barnraise.hub.rounds.persistent_map import LeaseTable, PersistentMap
from barnraise.hub.rounds.sample_pool import SamplePool
from barnraise.hub.rounds.state_machine import RoundState
from barnraise.hub.storage.create import HubFounding
from barnraise.hub.storage.log import HubSnapshot, read_fact


def restore_state(snapshot: HubSnapshot, founding: HubFounding, now: float, *, is_region: bool) -> RoundState:
    """Return the state that the log describes. Every lease gets its whole time again."""
    course = read_fact(snapshot.facts, "course", HubDataOrder)
    if is_region and course is not None:  # its parent leases them again
        pool = SamplePool(course.samples * course.epochs)
    else:
        pool = read_fact(snapshot.facts, "pool", SamplePool) or SamplePool()
    return RoundState(
        terms=founding.terms,
        course=course,
        version=snapshot.versions[-1].number if snapshot.versions else None,
        pool=pool,
        lent=LeaseTable({lease.id: renew(lease, founding.terms, now) for lease in snapshot.leases}),
        waiting=PersistentMap({arrival.update.id: arrival.update for arrival in snapshot.arrivals}),
        delivered=PersistentMap({arrival.update.node: arrival.update.id for arrival in snapshot.arrivals}),
        is_region=is_region,
        usual=PersistentMap(
            {node: member.usual for node, member in snapshot.members.items() if member.usual}
        ),
        since=now,
        known=sum(fingerprint.norm > 0 for fingerprint in snapshot.seen),
    )


def covered_samples(snapshot: HubSnapshot, state: RoundState) -> int:
    """Return the number of samples in committed versions.

    A hub that took over does not know the first versions, so it subtracts free, leased and pending samples.
    """
    if state.is_region:
        return sum(version.samples for version in snapshot.versions)
    free = sum(span.size for span in state.pool.returned)
    lent = sum(lease.samples for lease in state.lent.values())
    return state.pool.cursor - free - lent - sum(update.samples for update in state.waiting.values())
