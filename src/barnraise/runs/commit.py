"""Commit decision after a failure: whether the last step of a broken group counts. Pure.

Within a group a member applies a step once every member has voted that it holds the same result. If the
group breaks before that, the survivors meet in the next group. Each reports its number of applied steps, the
result that it holds but has not applied, and its micro-batches. After that report it applies nothing in the
old group. From the same reports all members decide the same:

- A member has applied step s. Then every member held its result, so the others apply it, too.
- All survivors hold the same result of s. No member can have decided otherwise, so all apply it.
- Otherwise all discard the result, and repeat s with the gradients that the survivors still have.

A member may compute micro-batches of the next step while a result is in flight. It keeps them in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.errors import ProtocolError

Step = Annotated[int, Meta(ge=0, le=1 << 50)]
Digest = Annotated[bytes, Meta(max_length=32)]
Speed = Annotated[float, Meta(ge=0, le=1e15)]
Units = Annotated[tuple[int, ...], Meta(max_length=1 << 20)]
MapNumber = Annotated[int, Meta(ge=-1, le=1 << 50)]
MapKey = tuple[MapNumber, MapNumber]  # the step at which a map is called, and the maps before it at this step

NO_MAP: MapKey = (-1, -1)


class MemberState(msgspec.Struct, frozen=True, array_like=True):
    """State that a member reports when it enters a group. ``done``: number of steps that it has applied."""

    fresh: bool  # it has no training state yet
    done: Step = 0
    held: Digest = b""  # digest of the result of the next step, if it holds one
    units: Units = ()  # micro-batches in its gradients of that step
    recovered_live: bool = False  # a joining worker that recovered the state live, up to ``done``
    speed: Speed = 0.0  # samples per second; 0 if unknown
    arithmetic: Digest = b""  # equal on machines that compute the same bits
    ahead: Units = ()  # micro-batches that it has computed of the step after that
    epoch: tuple[Step, Step] = (0, 0)  # its epoch, and the number of batches before it
    overlaps: bool = True  # it can compute during an all-reduce
    map_key: MapKey = NO_MAP  # the map that it is in


class CommitDecision(msgspec.Struct, frozen=True):
    """Decision that all members of the new group take."""

    done: int  # number of steps that are applied once all members have followed
    apply: bool  # members with the result apply it first
    claimed: tuple[frozenset[int], ...]  # micro-batches of the next step that each rank keeps
    ahead: tuple[frozenset[int], ...]  # and of the step after that
    donors: tuple[int, ...]  # ranks that have the training state
    fresh: tuple[int, ...]
    why: str
    recovered_live: tuple[int, ...] = ()  # fresh ranks that have recovered the state live
    speeds: tuple[float, ...] = ()  # of every rank; empty if unknown
    mixed: bool = False  # members compute different bits
    epoch: tuple[int, int] = (0, 0)
    overlaps: bool = True  # all members can overlap
    map_key: tuple[int, int] = NO_MAP  # the map that is the furthest behind, of those that members are in


def decide_commit(states: Sequence[MemberState]) -> CommitDecision:
    """Decide whether the last step counts, and which members keep which micro-batches.

    Raise ProtocolError if the states contradict each other: then one of them is not of this run.
    """
    decision = _conclude(states)
    near = [
        rank for rank in decision.fresh if states[rank].recovered_live and states[rank].done == decision.done
    ]
    mixed = len({state.arithmetic for state in states}) > 1
    epoch = max((state.epoch for state in states if not state.fresh), default=(0, 0))
    return msgspec.structs.replace(
        decision,
        recovered_live=tuple(near),
        speeds=_speeds(states),
        mixed=mixed,
        epoch=epoch,
        overlaps=all(state.overlaps for state in states),
        map_key=min((state.map_key for state in states if state.map_key != NO_MAP), default=NO_MAP),
    )


def _speeds(states: Sequence[MemberState]) -> tuple[float, ...]:
    """Return the speed of each rank; an unknown speed counts as the slowest one, so that no rank waits for
    it.
    """
    known = [state.speed for state in states if state.speed > 0]
    return tuple(state.speed or min(known) for state in states) if known else ()


def _conclude(states: Sequence[MemberState]) -> CommitDecision:
    fresh = tuple(rank for rank, state in enumerate(states) if state.fresh)
    old = [(rank, state) for rank, state in enumerate(states) if not state.fresh]
    none: tuple[frozenset[int], ...] = tuple(frozenset() for _ in states)
    if not old:
        return CommitDecision(0, False, none, none, (), fresh, "no worker has a training state yet")
    max_done = max(state.done for _, state in old)
    min_done = min(state.done for _, state in old)
    holders = [state for _, state in old if state.done == min_done and state.held]
    digests = {state.held for state in holders}
    if max_done == min_done:
        if len(holders) == len(old) and len(digests) == 1:
            why = f"every survivor holds the same result of step {min_done}"
            return CommitDecision(min_done + 1, True, *_kept(states, min_done + 1), _ranks(old), fresh, why)
        why = f"step {min_done} did not reach all workers and is repeated with the gradients that are left"
        return CommitDecision(min_done, False, *_kept(states, min_done), _ranks(old), fresh, why)
    if max_done != min_done + 1:
        raise ProtocolError(f"workers of one group have applied {min_done} and {max_done} steps")
    if any(state.done == min_done and not state.held for _, state in old) or len(digests) != 1:
        raise ProtocolError(f"step {min_done} was applied by one worker and did not reach another")
    why = f"step {min_done} was applied by one worker, so all have it"
    return CommitDecision(max_done, True, *_kept(states, max_done), _ranks(old), fresh, why)


def _kept(
    states: Sequence[MemberState], step: int
) -> tuple[tuple[frozenset[int], ...], tuple[frozenset[int], ...]]:
    """Return the micro-batches of this step, and of the next one, that each member has computed."""

    def kept_of(wanted: int) -> tuple[frozenset[int], ...]:
        kept = []
        for state in states:
            own = {state.done: state.units, state.done + 1: state.ahead}.get(wanted, ())
            kept.append(frozenset(() if state.fresh else own))
        taken = [unit for units in kept for unit in units]
        if len(taken) != len(set(taken)):
            raise ProtocolError(f"a micro-batch of step {wanted} is in the gradients of two workers")
        return tuple(kept)

    return kept_of(step), kept_of(step + 1)


def _ranks(old: Sequence[tuple[int, MemberState]]) -> tuple[int, ...]:
    return tuple(rank for rank, _ in old)
