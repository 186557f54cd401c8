"""Decisions from what the members of a group hold."""

from __future__ import annotations

from typing import Any

import pytest

from barnraise.training.pipeline.holdings import (
    MemberHoldings,
    decide_regroup,
    plan_transfers,
    units_of,
)

BLOCKS = 4
UNITS = [True] * (BLOCKS + 2)  # something is trained in each


def member(
    run: tuple[int, int], mirrored: tuple[int, int] | tuple[()], done: int = 7, **more: Any
) -> MemberHoldings:
    return MemberHoldings(done, units_of(run, BLOCKS), units_of(mirrored, BLOCKS) if mirrored else (), **more)


# Stages of blocks 0-1, 2 and 3 on three machines; each mirrors the one before it.
THREE = [member((0, 2), (3, 4)), member((2, 3), (0, 2)), member((3, 4), (2, 3))]


def test_units_have_the_parts_at_both_ends() -> None:
    assert units_of((0, 2), BLOCKS) == (0, 1, 2)
    assert units_of((2, 3), BLOCKS) == (3,)
    assert units_of((3, 4), BLOCKS) == (4, 5)
    assert units_of((0, 4), BLOCKS) == tuple(range(len(UNITS)))


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_any_single_death_loses_no_unit(dead: int) -> None:
    left = [each for rank, each in enumerate(THREE) if rank != dead]
    decision = decide_regroup(left, UNITS)
    assert decision.lost == ()
    assert set(decision.holders) == set(range(len(UNITS)))
    assert (decision.done, decision.apply_factor) == (7, None)


def test_units_of_two_neighbours_are_lost_with_both() -> None:
    assert decide_regroup(THREE[2:], UNITS).lost == (0, 1, 2)


def test_step_that_one_member_has_applied_is_applied_by_all() -> None:
    ahead = member((0, 2), (3, 4), 8, factor=0.5, loss=2.0)
    behind = [member((2, 3), (0, 2), is_ready=True), member((3, 4), (2, 3), is_ready=True)]
    decision = decide_regroup([ahead, *behind], UNITS)
    assert (decision.done, decision.apply_factor, decision.loss) == (8, 0.5, 2.0)


def test_step_that_no_member_has_applied_is_repeated() -> None:
    members = [member((0, 2), (3, 4), is_ready=True), member((2, 4), (0, 2), is_ready=True)]
    assert decide_regroup(members, UNITS).apply_factor is None


def test_fresh_members_start_at_step_0() -> None:
    decision = decide_regroup([MemberHoldings(), MemberHoldings()], UNITS)
    assert (decision.done, decision.holders, decision.lost) == (0, {}, ())
    begun = decide_regroup([member((0, 2), (), 0), MemberHoldings()], UNITS)
    assert (begun.done, begun.holders, begun.lost) == (0, {}, ()), "the first state comes from the seed"


def test_units_without_anything_trained_are_never_lost() -> None:
    assert decide_regroup(THREE[2:], [False, False, False, *UNITS[3:]]).lost == ()
    assert decide_regroup(THREE[2:], [False, False, True, *UNITS[3:]]).lost == (2,)


def test_lost_part_of_a_checkpoint_is_read_again_before_the_next_step() -> None:
    restored = [member((0, 2), (), is_restored=True), MemberHoldings()]
    decision = decide_regroup(restored, UNITS)
    assert (decision.done, decision.holders, decision.lost) == (0, {}, ())
    ahead = [member((0, 2), (), is_restored=True), member((2, 3), ())]
    assert decide_regroup(ahead, UNITS).lost == (4, 5), "one of them has trained on"
    another = [member((0, 4), (), 7, is_restored=True), member((0, 4), (), 5, is_restored=True)]
    assert decide_regroup(another, UNITS) == (0, None, 0.0, {}, (), False), "they have read two checkpoints"
    begun = [member((0, 4), (), 7, is_restored=True), member((0, 4), (), 0)]
    assert decide_regroup(begun, UNITS).holders == {}, "the second one has made the first state before"
    complete = decide_regroup([member((0, 4), (), is_restored=True), MemberHoldings()], UNITS)
    assert (complete.done, complete.is_restored) == (7, True), "the others get it from the first one"


def test_only_what_is_not_here_is_sent() -> None:
    left = [THREE[0], THREE[2]]
    decision = decide_regroup(left, UNITS)
    runs = [(0, 2), (2, 4)]
    transfers = plan_transfers(left, runs, [1, 0], decision.holders, BLOCKS)
    # The first needs block 2 as a mirror; the second has it as a mirror, and needs blocks 0 and 1.
    assert transfers == [(3, 1, 0), (0, 0, 1), (1, 0, 1), (2, 0, 1)]


def test_joining_member_gets_its_stage_and_its_mirror() -> None:
    members = [member((0, 4), (0, 4)), MemberHoldings()]
    decision = decide_regroup(members, UNITS)
    transfers = plan_transfers(members, [(0, 2), (2, 4)], [1, 0], decision.holders, BLOCKS)
    assert {each.unit for each in transfers if each.receiver == 1} == set(range(len(UNITS)))
    assert all(each.sender == 0 for each in transfers)


def test_member_gets_all_that_it_mirrors_and_no_more() -> None:
    members = [member((0, 4), ()), MemberHoldings(), MemberHoldings()]
    holders = decide_regroup(members, UNITS).holders
    transfers = plan_transfers(members, [(0, 2), (2, 3), (3, 4)], [None, None, 1], holders, BLOCKS)
    assert {each.unit for each in transfers if each.receiver == 1} == {3, 4, 5}
    assert {each.unit for each in transfers if each.receiver == 2} == {4, 5}
