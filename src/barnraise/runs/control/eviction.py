"""Choose which ranks to evict when all machines are up but no group can form. Pure.

Two machines may not reach each other although all others reach both. A worker may hang while its agent is
healthy. Both show as complaints: between machines that miss each other's heartbeats, and from workers about
the ranks that they lost. The fewest and most junior ranks are evicted, so that no complaint is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from barnraise.runs.record import WorkerSlot, WorkerState

UNREACHABLE_S = 1.5  # how long two machines must have missed each other's heartbeats
BLAMED_S = 1.5  # how long to wait for other evidence before complaints alone decide

Pair = frozenset[bytes]


class Eviction(NamedTuple):
    """Member that is evicted, and the rank that complained about it."""

    rank: int
    blamed_by: int
    is_silent: bool  # it has not reported that its group broke


def choose_evictions(
    slots: Sequence[WorkerSlot],
    states: Sequence[WorkerState | None],
    generation: int,
    unreachable_s: Mapping[Pair, float],
    stuck_s: float,
    controller: bytes = b"",
) -> list[Eviction]:
    """Return the ranks to evict.

    ``states``: by rank. ``stuck_s``: how long a member has waited for another group. A rank that cannot
    reach the controller's machine is evicted first, because it could not join a new group.
    """
    complaints = set(_machine_complaints(slots, unreachable_s))
    waiting = [is_waiting_for_group(state, generation) for state in states]
    if stuck_s >= BLAMED_S:
        complaints |= set(_worker_complaints(slots, states, waiting))
    evictions = []
    while complaints:
        counts = [sum(rank in pair for pair in complaints) for rank in range(len(slots))]
        blamed = {rank for pair in complaints for rank in pair}
        worst = max(
            blamed,
            key=lambda rank: (
                not waiting[rank] and any(waiting),
                frozenset((slots[rank].node, controller)) in unreachable_s,
                counts[rank],
                rank,
            ),
        )
        partners = [rank for pair in complaints if worst in pair for rank in pair if rank != worst]
        evictions.append(Eviction(worst, min(partners), not waiting[worst] and any(waiting)))
        complaints = {pair for pair in complaints if worst not in pair}
    return evictions


def is_waiting_for_group(state: WorkerState | None, generation: int) -> bool:
    """Return True if the worker has reported that the group of this generation broke."""
    return state is not None and state.state == "waiting" and state.broken_generation == generation


def unreachable_peer(
    node: bytes, others: Collection[bytes], unreachable_s: Mapping[Pair, float]
) -> bytes | None:
    """Return the first of the other machines that this machine cannot reach; None if it reaches all."""
    return next((other for other in others if frozenset((node, other)) in unreachable_s), None)


def _machine_complaints(
    slots: Sequence[WorkerSlot], unreachable_s: Mapping[Pair, float]
) -> Iterable[frozenset[int]]:
    """Yield the pairs of ranks whose machines have missed each other's heartbeats for too long."""
    for first, slot in enumerate(slots):
        for second in range(first + 1, len(slots)):
            if unreachable_s.get(frozenset((slot.node, slots[second].node)), -1.0) >= UNREACHABLE_S:
                yield frozenset((first, second))


def _worker_complaints(
    slots: Sequence[WorkerSlot], states: Sequence[WorkerState | None], waiting: Sequence[bool]
) -> Iterable[frozenset[int]]:
    """Yield the pairs of a waiting rank and a rank that it lost."""
    for rank, state in enumerate(states):
        if state is not None and waiting[rank]:
            yield from (
                frozenset((rank, lost)) for lost in state.blames if lost != rank and lost < len(slots)
            )
