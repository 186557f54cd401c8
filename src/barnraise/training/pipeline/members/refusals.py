"""Refusal of members that train something else than the others, or report what cannot be true.

All members judge the same reports by the same rules, so all refuse the same ones. A refused member ends with
the reason. The others take it for lost, and form the next group without it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from barnraise.core.decoding import decode
from barnraise.core.errors import PeerLost, ProtocolError, WorkerRefused
from barnraise.training.group.interface import GroupManager
from barnraise.training.pipeline.holdings import MemberHoldings, StageVote, has_not_trained
from barnraise.training.pipeline.members.model_facts import difference

log = logging.getLogger("barnraise.training")

T = TypeVar("T")
Refusals = Mapping[int, str]  # reasons by rank

_MOST = 1e300  # more than any loss or norm whose sum over the members is a number
_DATA_HINT = "Give this machine the same data set, in the same order. Then start its agent again."


def read_reports(
    manager: GroupManager, decoder: msgspec.msgpack.Decoder[T], messages: Sequence[bytes]
) -> list[T]:
    """Return the reports of all members by rank. Refuse members whose report cannot be read."""
    reports, unreadable = [], {}
    for rank, message in enumerate(messages):
        try:
            reports.append(decode(decoder, message, "it sends a report that cannot be read"))
        except ProtocolError as error:
            unreadable[rank] = error.message
    refuse(manager, unreadable)
    return reports


def refuse(manager: GroupManager, refusals: Refusals, *, hint: str | None = None) -> None:
    """Refuse members: raise WorkerRefused on these, and PeerLost on the others. Return if there are none."""
    if not refusals:
        return
    accepted = [rank for rank in range(manager.world) if rank not in refusals]
    lines = {
        rank: f"{manager.name_of(rank)} is refused by the other workers: {why}"
        for rank, why in sorted(refusals.items())
    }
    if manager.rank in refusals:
        raise WorkerRefused(lines[manager.rank], hint=hint) from None
    if manager.rank == accepted[0]:
        for line in lines.values():
            log.warning(line)
    first = min(refusals)
    raise PeerLost(first, lines[first])


def judge_holdings(members: Sequence[MemberHoldings], names: Sequence[str], units: int) -> dict[int, str]:
    """Return which members of a group are refused by what they report when they enter it, and why.

    ``units``: of the model. Members that have trained already decide what the model is, and else all.
    """
    refusals: dict[int, str] = {}
    taking_part = [rank for rank, member in enumerate(members) if not member.is_fresh]
    judges = taking_part or list(range(len(members)))
    models = [member.model for member in members]
    known = Counter(models[rank] for rank in judges)

    def support(rank: int) -> int:
        return sum(count for model, count in known.items() if not difference(models[rank], model, ""))

    reference = _commonest(judges, support)
    for rank, model in enumerate(models):
        if why := difference(model, models[reference], names[reference]):
            refusals[rank] = why
    for rank in taking_part:
        last = max((*members[rank].own, *members[rank].others), default=0)
        if last >= units:
            refusals.setdefault(rank, f"it reports part {last} of a model that has {units} parts")
    old = [rank for rank in taking_part if rank not in refusals]
    return refusals | _judge_steps(members, names, old)


def _judge_steps(
    members: Sequence[MemberHoldings], names: Sequence[str], old: Sequence[int]
) -> dict[int, str]:
    """Return the members whose number of steps contradicts that of the others.

    A member is at most one step behind, and then it has voted on that step. If none has trained since it read
    a checkpoint, some may have read another one before a link broke: all read again.
    """
    if has_not_trained(members[rank] for rank in old):
        return {}

    def agreeing(step: int) -> list[int]:
        return [
            rank
            for rank in old
            if members[rank].done == step or (members[rank].done == step - 1 and members[rank].is_ready)
        ]

    groups = [agreeing(step) for step in sorted({members[rank].done for rank in old})]
    if not groups:
        return {}
    largest = max(groups, key=lambda ranks: (len(ranks), -min(ranks)))
    first = largest[0]
    return {
        rank: f"it reports {members[rank].done} steps, and {names[first]} reports {members[first].done}"
        for rank in old
        if rank not in largest
    }


def judge_votes(votes: Sequence[StageVote], names: Sequence[str]) -> dict[int, str]:
    """Return which members are refused by their votes on a step, and why."""
    ranks = range(len(votes))
    steps = Counter(vote.step for vote in votes)
    reference = _commonest(ranks, lambda rank: steps[votes[rank].step])
    step = votes[reference].step
    refusals = {
        rank: f"it votes on step {vote.step + 1}, and {names[reference]} votes on step {step + 1}"
        for rank, vote in enumerate(votes)
        if vote.step != step
    }
    for rank, vote in enumerate(votes):
        if vote.squared_norm < 0 or any(
            math.isfinite(value) and abs(value) > _MOST for value in (vote.loss, vote.squared_norm)
        ):
            refusals.setdefault(rank, "it reports a loss or a norm that no training has")
    return refusals


def judge_samples(votes: Sequence[StageVote], names: Sequence[str]) -> dict[int, str]:
    """Return which members have loaded other samples than most."""
    loaded = [rank for rank, vote in enumerate(votes) if vote.fingerprint]
    if not loaded:
        return {}
    known = Counter(votes[rank].fingerprint for rank in loaded)
    reference = _commonest(loaded, lambda rank: known[votes[rank].fingerprint])
    return {
        rank: f"it has other samples in step {votes[rank].step + 1} than {names[reference]}"
        for rank in loaded
        if votes[rank].fingerprint != votes[reference].fingerprint
    }


def check_votes(manager: GroupManager, votes: Sequence[StageVote]) -> None:
    """Refuse members whose votes contradict those of the others."""
    names = names_of(manager)
    refuse(manager, judge_votes(votes, names))
    refuse(manager, judge_samples(votes, names), hint=_DATA_HINT)


def names_of(manager: GroupManager) -> list[str]:
    """Return the names of the members' machines, by rank."""
    return [manager.name_of(rank) for rank in range(manager.world)]


def _commonest(ranks: Sequence[int], support: Callable[[int], int]) -> int:
    """Return the rank that most members agree with; of several the lowest one."""
    return max(ranks, key=lambda rank: (support(rank), -rank))
