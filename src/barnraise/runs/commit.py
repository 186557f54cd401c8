"""Whether a step counts: what the members of a new group conclude from what each of them brings. Pure.

Within a group a member applies the result of a step when it has the word of every member that it holds the
same result. When the group breaks before that, its survivors meet in the next one. Each says how far it is,
which result it holds but has not applied, and which units are in its sums. By being there it has sealed the
old group: it reports and applies nothing in it any more. From the same words all conclude the same:

- Somebody has applied step s: then every member held its result, so the others apply theirs, too.
- Everybody who survived holds the same result of s: nobody can have decided otherwise, all apply it.
- Otherwise it is discarded by all, and s is repeated with the sums that the survivors still have.

A member may compute units of the next step while the result of one is on its way; it keeps them, whatever
becomes of that one.
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


class MemberState(msgspec.Struct, frozen=True, array_like=True):
    """What a member brings into a group. ``done``: how many steps it has applied."""

    fresh: bool  # it has no state yet
    done: Step = 0
    held: Digest = b""  # the digest of the result of the step after those, if it has one
    units: Units = ()  # in its sums for that step
    nursed: bool = False  # a newcomer that has followed the others to ``done``
    speed: Speed = 0.0  # samples per second; 0: not known yet
    arithmetic: Digest = b""  # the same on machines that compute the same bits
    ahead: Units = ()  # that it has computed of the step after that one
    epoch: tuple[Step, Step] = (0, 0)  # the pass over the data that it is in, and the batches before that
    overlaps: bool = True  # it could compute while a round is summed


class CommitDecision(msgspec.Struct, frozen=True):
    """What all of them do now."""

    done: int  # steps that are applied once everybody has followed
    apply: bool  # those who hold the result apply it first
    claimed: tuple[frozenset[int], ...]  # units of the next step that each rank keeps
    ahead: tuple[frozenset[int], ...]  # and of the step after that
    donors: tuple[int, ...]  # ranks with the state, for those without
    fresh: tuple[int, ...]
    why: str
    nursed: tuple[int, ...] = ()  # of the fresh: those who may have the state already
    speeds: tuple[float, ...] = ()  # of every rank; empty: nothing is known
    mixed: bool = False  # members compute different bits
    epoch: tuple[int, int] = (0, 0)
    overlaps: bool = True  # all of them could


def decide_commit(words: Sequence[MemberState]) -> CommitDecision:
    """ProtocolError if the words contradict each other: then somebody's state is not of this run."""
    verdict = _conclude(words)
    near = [rank for rank in verdict.fresh if words[rank].nursed and words[rank].done == verdict.done]
    mixed = len({word.arithmetic for word in words}) > 1
    epoch = max((word.epoch for word in words if not word.fresh), default=(0, 0))
    return msgspec.structs.replace(
        verdict,
        nursed=tuple(near),
        speeds=_speeds(words),
        mixed=mixed,
        epoch=epoch,
        overlaps=all(word.overlaps for word in words),
    )


def _speeds(words: Sequence[MemberState]) -> tuple[float, ...]:
    """Who is not known yet is taken for the slowest, so that nobody has to wait for it."""
    known = [word.speed for word in words if word.speed > 0]
    return tuple(word.speed or min(known) for word in words) if known else ()


def _conclude(words: Sequence[MemberState]) -> CommitDecision:
    fresh = tuple(rank for rank, word in enumerate(words) if word.fresh)
    old = [(rank, word) for rank, word in enumerate(words) if not word.fresh]
    none: tuple[frozenset[int], ...] = tuple(frozenset() for _ in words)
    if not old:
        return CommitDecision(0, False, none, none, (), fresh, "nobody has a state yet")
    most = max(word.done for _, word in old)
    least = min(word.done for _, word in old)
    holders = [word for _, word in old if word.done == least and word.held]
    digests = {word.held for word in holders}
    if most == least:
        if len(holders) == len(old) and len(digests) == 1:
            why = f"every survivor holds the same result of step {least}"
            return CommitDecision(least + 1, True, *_kept(words, least + 1), _ranks(old), fresh, why)
        why = f"step {least} was not held by everybody and is repeated with the sums that are left"
        return CommitDecision(least, False, *_kept(words, least), _ranks(old), fresh, why)
    if most != least + 1:
        raise ProtocolError(f"members of one group have applied {least} and {most} steps")
    if any(word.done == least and not word.held for _, word in old) or len(digests) != 1:
        raise ProtocolError(f"step {least} was applied by one member and is not held by another")
    why = f"step {least} was applied by one survivor, hence held by all"
    return CommitDecision(most, True, *_kept(words, most), _ranks(old), fresh, why)


def _kept(
    words: Sequence[MemberState], step: int
) -> tuple[tuple[frozenset[int], ...], tuple[frozenset[int], ...]]:
    """The units of this step, and of the one after it, that each member has computed."""

    def of(wanted: int) -> tuple[frozenset[int], ...]:
        kept = []
        for word in words:
            mine = {word.done: word.units, word.done + 1: word.ahead}.get(wanted, ())
            kept.append(frozenset(() if word.fresh else mine))
        taken = [unit for units in kept for unit in units]
        if len(taken) != len(set(taken)):
            raise ProtocolError(f"a unit of step {wanted} is in the sums of two members")
        return tuple(kept)

    return of(step), of(step + 1)


def _ranks(old: Sequence[tuple[int, MemberState]]) -> tuple[int, ...]:
    return tuple(rank for rank, _ in old)
