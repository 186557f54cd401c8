"""Handover of trained state before machines leave."""

from __future__ import annotations

import pytest

from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.pipeline.holdings import Transfer
from barnraise.training.pipeline.members import handover
from barnraise.training.pipeline.members.handover import (
    LeaveNotice,
    ReportedGenerations,
    StayingMember,
    exchange_notices,
    is_confirmed,
    plan_handover,
)

SIZES = dict.fromkeys(range(4), 10)


def ring(leaving: str, free: int | None = None) -> list[StayingMember]:
    """Return four members, each with a unit of its own and that of the one before it."""
    return [
        StayingMember(name, (rank, (rank - 1) % 4), name in leaving, free) for rank, name in enumerate("abcd")
    ]


def test_nothing_is_sent_if_all_or_none_leave() -> None:
    assert plan_handover(ring(""), SIZES) == ((), ())
    assert plan_handover(ring("abcd"), SIZES) == ((), ())


@pytest.mark.parametrize("leaving", ["a", "ab", "bc", "bd", "cd"])
def test_each_unit_has_two_machines_that_stay(leaving: str) -> None:
    members = ring(leaving)
    plan = plan_handover(members, SIZES)
    assert plan.lost == ()
    holders = {
        unit: {rank for rank, member in enumerate(members) if unit in member.units and not member.leaves}
        for unit in SIZES
    }
    for unit, sender, receiver in plan.transfers:
        assert unit in members[sender].units
        holders[unit].add(receiver)
    for ranks in holders.values():
        assert len(ranks) == 2
        assert not any(members[rank].leaves for rank in ranks)


def test_last_machine_gets_everything() -> None:
    plan = plan_handover(ring("bcd"), SIZES)
    assert plan.transfers == (Transfer(1, 1, 0), Transfer(2, 2, 0))


def test_second_copy_is_left_out_without_memory_and_a_lost_one_is_named() -> None:
    assert plan_handover(ring("a", 5), SIZES) == ((), ())
    assert plan_handover(ring("bc", 5), SIZES).lost == (1,)
    assert plan_handover(ring("bc", 10), SIZES).transfers == (Transfer(1, 1, 0), Transfer(0, 0, 3))
    assert plan_handover(ring("bc", 10), SIZES).lost == ()


class _LateManager(SingleWorkerManager):
    """Group manager whose agent knows the next group at the third question, or never."""

    def __init__(self, answers: list[bool | None]) -> None:
        super().__init__()
        self._answers = answers

    def is_member(self, generation: int) -> bool | None:
        return self._answers.pop(0) if self._answers else None


def test_notice_waits_for_the_agent_and_stays_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    left = exchange_notices(_LateManager([None, None, False]), 2)
    assert left == [LeaveNotice(leaves=True, knows=True)]
    monkeypatch.setattr(handover, "_AGENT_S", 0.1)
    assert exchange_notices(_LateManager([]), 2) == [LeaveNotice()]


def test_next_group_counts_if_most_agents_know_it() -> None:
    known, unknown = LeaveNotice(knows=True), LeaveNotice()
    assert is_confirmed([known])
    assert is_confirmed([known, known, unknown])
    assert not is_confirmed([known, unknown])
    assert not is_confirmed([known, unknown, unknown])


def test_group_that_only_one_member_knows_is_ignored_until_others_report_it() -> None:
    reported = ReportedGenerations()
    assert reported.newest([2, 2, 9]) == 9
    assert reported.ignore([2, 2, 9], 9) == [2]
    assert reported.newest([2, 2, 9]) == 2
    assert reported.newest([2, 9, 9]) == 9
    assert reported.newest([2, 2, 10]) == 10
    assert ReportedGenerations().newest([]) == -1
