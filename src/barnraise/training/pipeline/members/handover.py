"""Handover of trained state before machines leave on purpose. The plan is pure.

Machines that leave finish the step with their group. What they alone hold then gets two holders among those
that stay. The two are on different machines if possible, because another one may leave in the same moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from barnraise.training.group.interface import GroupManager
from barnraise.training.pipeline.holdings import Transfer
from barnraise.training.pipeline.members.refusals import read_reports

log = logging.getLogger("barnraise.training")

_HOLDERS = 2
_AGENT_S = 3.0  # until this machine's agent knows the next group, which others know already
_POLL_S = 0.05


class LeaveNotice(msgspec.Struct, frozen=True, array_like=True):
    """Notice of a member to its group before the next one.

    ``leaves``: it is not in the next one. ``knows``: its agent knows of the next one.
    """

    leaves: bool = False
    knows: bool = False


_notices = msgspec.msgpack.Decoder(LeaveNotice)


class StayingMember(NamedTuple):
    """Member of a group. ``units``: whose trained state it has. ``free_bytes``: None if unknown."""

    machine: str
    units: Collection[int]
    leaves: bool = False
    free_bytes: int | None = None


class HandoverPlan(NamedTuple):
    """State that is sent before machines leave. ``lost``: units for which no member has memory."""

    transfers: tuple[Transfer, ...]
    lost: tuple[int, ...]


class ReportedGenerations:
    """Newest generations that the members of a group report.

    One that most agents do not know is ignored from then on, if the same member reports it.
    """

    def __init__(self) -> None:
        self._ignored: dict[int, int] = {}  # by rank

    def newest(self, reported: Sequence[int]) -> int:
        """Return the newest generation of these reports by rank; -1 if all are ignored."""
        return max(
            (each for rank, each in enumerate(reported) if each > self._ignored.get(rank, -1)), default=-1
        )

    def ignore(self, reported: Sequence[int], generation: int) -> list[int]:
        """Ignore a generation from now on. Return the ranks that report it."""
        ranks = [rank for rank, each in enumerate(reported) if each == generation]
        self._ignored |= dict.fromkeys(ranks, generation)
        return ranks


def exchange_notices(manager: GroupManager, generation: int) -> list[LeaveNotice]:
    """Return by rank the notices of all members before the group of a newer generation.

    All members call it together. Each asks its agent, for a few seconds at most.
    """
    deadline = time.monotonic() + _AGENT_S
    while (stays := manager.is_member(generation)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if stays is None:
        log.warning("the agent does not say within %.0f s which group is next", _AGENT_S)
    own = LeaveNotice(leaves=stays is False, knows=stays is not None)
    messages = manager.group.all_gather_bytes(msgspec.msgpack.encode(own))
    return read_reports(manager, _notices, messages)


def is_confirmed(notices: Sequence[LeaveNotice]) -> bool:
    """Tell whether more than half of the members know of the next group."""
    return 2 * sum(notice.knows for notice in notices) > len(notices)


def plan_handover(members: Sequence[StayingMember], unit_bytes: Mapping[int, int]) -> HandoverPlan:
    """Return which trained state is sent to members that stay.

    ``unit_bytes``: what a unit takes in memory; units without trained state are left out.
    """
    staying = [rank for rank, member in enumerate(members) if not member.leaves]
    if not staying or len(staying) == len(members):
        return HandoverPlan((), ())
    wanted = min(_HOLDERS, len({members[rank].machine for rank in staying}))
    holders = {
        unit: [rank for rank, member in enumerate(members) if unit in member.units] for unit in unit_bytes
    }
    moving = sorted(unit for unit, ranks in holders.items() if any(members[rank].leaves for rank in ranks))
    machines = {
        unit: {members[rank].machine for rank in holders[unit] if not members[rank].leaves} for unit in moving
    }
    taken = dict.fromkeys(staying, 0)
    transfers = []
    for copies in range(1, wanted + 1):  # the last copy of a unit is more important than the second one
        for unit in moving:
            able = [
                rank
                for rank in staying
                if members[rank].machine not in machines[unit]
                and _has_room(members[rank], taken[rank] + unit_bytes[unit])
            ]
            if len(machines[unit]) < copies and able:
                receiver = min(able, key=lambda rank: (taken[rank], rank))
                taken[receiver] += unit_bytes[unit]
                machines[unit].add(members[receiver].machine)
                transfers.append(Transfer(unit, holders[unit][0], receiver))
    return HandoverPlan(tuple(transfers), tuple(unit for unit in moving if not machines[unit]))


def _has_room(member: StayingMember, needed: int) -> bool:
    return member.free_bytes is None or needed <= member.free_bytes
