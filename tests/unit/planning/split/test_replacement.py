"""Decision to place the blocks of a model again."""

from __future__ import annotations

from barnraise.planning.split.replacement import ReplacementState, decide_replacement


def checks(*gains: float) -> list[bool]:
    """Return the decisions of checks; a gain of 0.2: the best placement is so much faster."""
    state, decisions = ReplacementState(), []
    for gain in gains:
        decision = decide_replacement(state, 10.0 * (1 + gain), 10.0)
        state = decision.state
        decisions.append(decision.is_due)
    return decisions


def test_clear_and_stable_gain_places_the_blocks_again() -> None:
    assert checks(0.2, 0.3, 0.2) == [False, False, True]


def test_small_gain_moves_nothing() -> None:
    assert not any(checks(*[0.14] * 50))


def test_gain_that_comes_and_goes_moves_nothing() -> None:
    assert not any(checks(*[0.5, 0.5, 0.0] * 20))


def test_each_change_needs_twice_as_many_checks_as_the_one_before() -> None:
    due = [number for number, is_due in enumerate(checks(*[0.2] * 200), 1) if is_due]
    assert due == [3, 9, 21, 45, 93, 141, 189]


def test_reason_names_both_predictions() -> None:
    decision = decide_replacement(ReplacementState(2), 4.0, 3.0)
    assert decision.is_due
    assert decision.why == "a step takes 4 s, and 3 s if blocks are moved; that is stable"
    assert "too small a gain" in decide_replacement(ReplacementState(), 3.0, 3.0).why
    assert "1 of 3 times" in decide_replacement(ReplacementState(), 4.0, 3.0).why
