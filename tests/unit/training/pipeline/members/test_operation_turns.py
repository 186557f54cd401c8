"""Turns of the operations of a new group."""

from __future__ import annotations

from barnraise.training.pipeline.members.operation_turns import NextOperation, Turn, choose_turn

STEP = NextOperation("step")


def test_step_begins_when_all_are_there() -> None:
    assert choose_turn([STEP, STEP]) == Turn("step", (0, 1))


def test_save_of_some_members_comes_before_the_step_of_others() -> None:
    assert choose_turn([NextOperation("save"), STEP, NextOperation("save")]) == Turn("save", (0, 2))


def test_operations_of_a_script_keep_their_order() -> None:
    members = [NextOperation("save", 1), NextOperation("gather", 0), STEP]
    assert choose_turn(members) == Turn("gather", (1,))
    assert choose_turn([members[0], NextOperation("save", 1), STEP]) == Turn("save", (0, 1), 1)
