"""Whom a session goes on without, when all of its machines are here and yet no group holds. Pure.

Two machines that everybody else reaches may not reach each other, and a worker may be stopped while its agent
is well. Either shows as complaints: between machines that miss each other's beats, and of workers whose group
broke, about the ranks that they lost. The fewest and most junior leave, so that no complaint is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from barnraise.runs.record import WorkerSlot, WorkerState

APART_S = 1.5  # how long two machines must have missed each other, after each had lost its patience
BLAMED_S = 1.5  # how long evidence of a death may take to arrive before complaints alone decide

Pair = frozenset[bytes]


class Eviction(NamedTuple):
    """A member that the others go on without, and because of whom."""

    rank: int
    blamed_by: int
    is_silent: bool  # it has not said that its group broke: its process does nothing


def choose_evictions(
    slots: Sequence[WorkerSlot],
    states: Sequence[WorkerState | None],
    generation: int,
    apart: Mapping[Pair, float],
    stuck_s: float,
    keeper: bytes = b"",
) -> list[Eviction]:
    """``states`` by rank; ``stuck_s``: for how long a member has waited for another group.

    Whoever does not reach the keeper's machine goes first: it could not meet the others in a new group.
    """
    complaints = set(_of_machines(slots, apart))
    waiting = [is_waiting_for_group(state, generation) for state in states]
    if stuck_s >= BLAMED_S:
        complaints |= set(_of_workers(slots, states, waiting))
    found = []
    while complaints:
        counts = [sum(rank in pair for pair in complaints) for rank in range(len(slots))]
        blamed = {rank for pair in complaints for rank in pair}
        worst = max(
            blamed,
            key=lambda rank: (
                not waiting[rank] and any(waiting),
                frozenset((slots[rank].node, keeper)) in apart,
                counts[rank],
                rank,
            ),
        )
        partners = [rank for pair in complaints if worst in pair for rank in pair if rank != worst]
        found.append(Eviction(worst, min(partners), not waiting[worst] and any(waiting)))
        complaints = {pair for pair in complaints if worst not in pair}
    return found


def is_waiting_for_group(state: WorkerState | None, generation: int) -> bool:
    """Whether it has said that this generation's group broke."""
    return state is not None and state.state == "waiting" and state.broke == generation


def unreachable_peer(node: bytes, others: Collection[bytes], apart: Mapping[Pair, float]) -> bytes | None:
    """The first of the others that this machine does not reach, or that does not reach it."""
    return next((other for other in others if frozenset((node, other)) in apart), None)


def _of_machines(slots: Sequence[WorkerSlot], apart: Mapping[Pair, float]) -> Iterable[frozenset[int]]:
    for first, one in enumerate(slots):
        for second in range(first + 1, len(slots)):
            if apart.get(frozenset((one.node, slots[second].node)), -1.0) >= APART_S:
                yield frozenset((first, second))


def _of_workers(
    slots: Sequence[WorkerSlot], states: Sequence[WorkerState | None], waiting: Sequence[bool]
) -> Iterable[frozenset[int]]:
    for rank, state in enumerate(states):
        if state is not None and waiting[rank]:
            yield from (frozenset((rank, one)) for one in state.blames if one != rank and one < len(slots))
