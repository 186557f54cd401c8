"""Holdings of the members of a group: their parts of a split model, and decisions when they regroup. Pure.

The model has units: the part before the blocks, each block, and the part after them. A member holds the
trained state of its stage and, as a mirror, that of other stages. A step is applied by a member after all
have voted that they have its gradients. So a step that any member has applied is applied by all; another
one is repeated with the same samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from barnraise.training.pipeline.members.model_facts import MOST_UNITS, ModelFacts
from barnraise.training.record.split_record import LoggedValues

Step = Annotated[int, Meta(ge=0, le=1 << 50)]
Unit = Annotated[int, Meta(ge=0, lt=MOST_UNITS)]
Units = Annotated[tuple[Unit, ...], Meta(max_length=MOST_UNITS)]
Run = tuple[int, int]  # of blocks: the first one, and the one after the last
Factor = Annotated[float, Meta(ge=0, le=1)]


class StageVote(msgspec.Struct, frozen=True, array_like=True):
    """A worker's vote: it holds the gradients of its stage, and of those that it mirrors.

    ``loss``: of the whole batch, from the last stage; 0 from the others. ``fingerprint``: of the samples.
    ``checkpoint_due``: one of any worker makes all save. ``speed``: samples of the whole model per second of
    its own computation. ``logged``: values of the step before. ``block_s``: seconds of a block here; 0 if
    unknown. ``placement_due``: rank 0 lets all place the blocks again. ``clip``: the norm to which all clip,
    as rank 0 says.
    """

    step: Step
    loss: float
    squared_norm: float
    newest_generation: Annotated[int, Meta(ge=-1, le=1 << 50)]
    fingerprint: Annotated[bytes, Meta(max_length=32)] = b""
    checkpoint_due: bool = False
    speed: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    logged: LoggedValues = {}
    block_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    placement_due: bool = False
    clip: Annotated[float, Meta(ge=0)] | None = None


class MemberHoldings(msgspec.Struct, frozen=True, array_like=True):
    """Report of a member that enters a group. ``done``: steps that it has applied.

    ``own``: units of its stage. ``others``: units whose trained state it mirrors or keeps. ``is_ready``: it
    has voted on the next step, and can apply it. ``factor`` and ``loss``: of the newest step that it has
    applied. ``model``: what all members must have alike. ``is_restored``: its state is that of a checkpoint,
    which can be read again. ``has_disk``: it can write parts of checkpoints, and read them.
    """

    done: Step = 0
    own: Units = ()
    others: Units = ()
    is_ready: bool = False
    factor: Factor = 1.0
    loss: float = 0.0
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    model: ModelFacts = ModelFacts()
    newest_generation: Annotated[int, Meta(ge=-1, le=1 << 50)] = -1  # that its agent knows
    is_restored: bool = False
    has_disk: bool = False

    @property
    def is_fresh(self) -> bool:
        """Return True if the member has taken no part in any step; a spare has, without trained state."""
        return not (self.own or self.others or self.done or self.is_ready)


class RegroupDecision(NamedTuple):
    """Decision that all members take alike. ``done``: steps that are applied once all have followed.

    ``apply_factor``: with which members that lack the newest step apply it; None if no member lacks one.
    ``holders``: the rank that has each unit, by unit. ``lost``: units that no member holds. ``is_restored``:
    all that is held is that of a checkpoint.
    """

    done: int
    apply_factor: float | None
    loss: float
    holders: dict[int, int]
    lost: tuple[int, ...]
    is_restored: bool = False


class Transfer(NamedTuple):
    """The trained state of a unit goes from one rank to another."""

    unit: int
    sender: int
    receiver: int


def decide_regroup(members: Sequence[MemberHoldings], units: Sequence[bool]) -> RegroupDecision:
    """Decide which step counts, and which rank has each unit. ``units``: whether anything is trained in each.

    The members were judged before, so their reports do not contradict each other. Before the first step
    nothing has to be sent: every member can make the first state itself. Members that have not trained since
    they read a checkpoint read it again if a part is lost, or if they have read two different ones.
    """
    old = [(rank, member) for rank, member in enumerate(members) if not member.is_fresh]
    done = max((member.done for _, member in old), default=0)
    if not done:
        return RegroupDecision(0, None, 0.0, {}, ())
    behind = [member for _, member in old if member.done < done]
    ahead = next(member for _, member in old if member.done == done)
    holders: dict[int, int] = {}
    for kind in ("own", "others"):
        for rank, member in old:
            for unit in getattr(member, kind):
                holders.setdefault(unit, rank)
    lost = tuple(unit for unit, is_trained in enumerate(units) if is_trained and unit not in holders)
    is_restored = has_not_trained(member for _, member in old)
    if is_restored and (lost or behind):
        return RegroupDecision(0, None, 0.0, {}, ())
    return RegroupDecision(done, ahead.factor if behind else None, ahead.loss, holders, lost, is_restored)


def has_not_trained(members: Iterable[MemberHoldings]) -> bool:
    """Tell whether all that these members hold can be made or read again: a first state, or a checkpoint."""
    return all(member.is_restored or not member.done for member in members)


def units_of(run: Run | None, blocks: int) -> tuple[int, ...]:
    """Return the units of a run of blocks: unit 0 is before the blocks, and the last one is after them."""
    if run is None:
        return ()
    first, end = run
    return (
        *((0,) if first == 0 else ()),
        *range(first + 1, end + 1),
        *((blocks + 1,) if end == blocks else ()),
    )


def blocks_of(units: Iterable[int]) -> frozenset[int]:
    """Return the numbers of the blocks whose units these are; what is before and after them may be there."""
    return frozenset(unit - 1 for unit in units if unit)


def plan_transfers(
    members: Sequence[MemberHoldings],
    runs: Sequence[Run | None],
    mirrors: Sequence[int | None],
    holders: Mapping[int, int],
    blocks: int,
) -> list[Transfer]:
    """Return what has to be sent so that each rank has its units and those that it mirrors.

    ``mirrors``: by rank, the rank that mirrors it.
    """
    transfers = []
    for rank, member in enumerate(members):
        wanted = set(units_of(runs[rank], blocks))
        for other, mirror in enumerate(mirrors):
            wanted |= set(units_of(runs[other], blocks)) if mirror == rank else set()
        for unit in sorted(wanted.difference(member.own, member.others)):
            if holders.get(unit, rank) != rank:
                transfers.append(Transfer(unit, holders[unit], rank))
    return transfers
