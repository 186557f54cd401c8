"""What all members of a group conclude from the words with which it begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.runs.commit import MemberState, conclude

FRESH = MemberState(True)
NONE: frozenset[int] = frozenset()


def at(done: int, held: str = "", units: tuple[int, ...] = (), ahead: tuple[int, ...] = ()) -> MemberState:
    """Build the word of a member with a state."""
    return MemberState(False, done, held.encode(), units, ahead=ahead)


@pytest.mark.parametrize(
    ("words", "done", "applies"),
    [
        pytest.param([FRESH, FRESH], 0, False, id="no member has a state"),
        pytest.param([at(5), at(5)], 5, False, id="no survivor holds a result"),
        pytest.param([at(5, "x"), at(5, "x")], 6, True, id="all survivors hold one result"),
        pytest.param([at(5, "x")], 6, True, id="the only survivor holds a result"),
        pytest.param([at(5, "x"), FRESH], 6, True, id="a fresh member needs to hold nothing"),
        pytest.param([at(5, "x"), at(5)], 5, False, id="one survivor holds no result"),
        pytest.param([at(5, "x"), at(5, "y")], 5, False, id="two survivors hold different results"),
        pytest.param([at(5, "x"), at(5, "x"), at(5, "y")], 5, False, id="one of three holds another result"),
        pytest.param([at(6), at(5, "x")], 6, True, id="one survivor has applied what the other holds"),
        pytest.param([at(6, "z"), at(5, "x")], 6, True, id="one survivor holds the result of the next step"),
        pytest.param([FRESH, at(5, "x"), at(6), at(6)], 6, True, id="two have applied what the third holds"),
    ],
)
def test_words_that_agree_lead_to_one_verdict(words: list[MemberState], done: int, applies: bool) -> None:
    """The order of the words changes nothing but the ranks."""
    for told in (words, words[::-1]):
        verdict = conclude(told)
        assert (verdict.done, verdict.apply) == (done, applies)
        assert verdict.donors == tuple(rank for rank, word in enumerate(told) if not word.fresh)
        assert verdict.fresh == tuple(rank for rank, word in enumerate(told) if word.fresh)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param([at(5, "x"), at(7)], "have applied 5 and 7 steps", id="a gap of two steps"),
        pytest.param([at(5, "x"), at(6), at(7)], "have applied 5 and 7 steps", id="three steps in one group"),
        pytest.param([at(0, "x"), at(1000)], "have applied 0 and 1000 steps", id="a state of another run"),
        pytest.param([at(6), at(5)], "is not held by another", id="applied by one, not held by another"),
        pytest.param([at(6), at(5, "x"), at(5)], "is not held by another", id="not held by the third"),
        pytest.param([at(6), at(5, "x"), at(5, "y")], "is not held by another", id="held as two results"),
        pytest.param(
            [at(5, "", (1, 2)), at(5, "", (2, 3))], "unit of step 5 is in the sums", id="a unit in two sums"
        ),
        pytest.param(
            [at(5, "x", (0,), (1,)), at(5, "x", (2,), (1,))],
            "unit of step 6 is in the sums",
            id="a unit of the next step in two sums",
        ),
        pytest.param(
            [at(6, "", (4,)), at(5, "x", (0,), (4,))],
            "unit of step 6 is in the sums",
            id="a unit in the sums of one member that is a step behind",
        ),
        pytest.param(
            [at(5, "", (1,), (7,)), at(5, "", (2,), (7,))],
            "unit of step 6 is in the sums",
            id="a unit computed ahead by two members while the step is repeated",
        ),
    ],
)
def test_words_that_contradict_each_other_are_refused(words: list[MemberState], reason: str) -> None:
    for told in (words, words[::-1]):
        with pytest.raises(ProtocolError, match=reason):
            conclude(told)


@pytest.mark.parametrize(
    ("words", "claimed", "ahead"),
    [
        pytest.param(
            [at(5, "", (0, 1), (7,)), at(5, "", (2,))],
            ({0, 1}, {2}),
            ({7}, NONE),
            id="a step that is repeated keeps all sums",
        ),
        pytest.param(
            [at(5, "x", (0, 1), (7,)), at(5, "x", (2,), (8,))],
            ({7}, {8}),
            (NONE, NONE),
            id="a step that is applied keeps what was computed ahead",
        ),
        pytest.param(
            [at(6, "", (7,), (9,)), at(5, "x", (0,), (8,))],
            ({7}, {8}),
            ({9}, NONE),
            id="a member a step behind keeps what it computed ahead",
        ),
        pytest.param(
            [MemberState(True, 5, b"", (0,), ahead=(1,)), at(5, "", (0,))],
            (NONE, {0}),
            (NONE, NONE),
            id="a fresh member keeps nothing",
        ),
    ],
)
def test_units_of_members_are_kept_for_the_step_that_they_belong_to(
    words: list[MemberState], claimed: tuple[set[int], ...], ahead: tuple[set[int], ...]
) -> None:
    verdict = conclude(words)
    assert verdict.claimed == claimed
    assert verdict.ahead == ahead


@given(
    st.lists(
        st.builds(at, st.integers(4, 7), st.sampled_from(["", "x", "y"]), st.sampled_from([(), (1,)])),
        min_size=1,
        max_size=4,
    )
)
def test_any_words_end_in_a_refusal_or_in_a_step_that_all_members_can_reach(words: list[MemberState]) -> None:
    """A member reaches the verdict's step if it is there, or holds the one result that leads to it."""
    try:
        verdict = conclude(words)
    except ProtocolError:
        done = {word.done for word in words}
        units = [(word.done, unit) for word in words for unit in word.units]
        behind = [word.held for word in words if word.done == min(done)]
        has_gap = len(done) > 1 and (max(done) > min(done) + 1 or not all(behind) or len(set(behind)) > 1)
        assert has_gap or len(units) != len(set(units)), "a refusal has a reason"
        return
    behind = [word.held for word in words if word.done < verdict.done]
    assert all(behind), "a member cannot apply what it does not hold"
    assert len(set(behind)) <= 1, "members apply the same bits"
    assert all(verdict.done - 1 <= word.done <= verdict.done for word in words)


def test_members_go_ahead_only_if_all_can() -> None:
    """One on MPS cannot; if the others did, they would deal the next round by other speeds than it."""
    able, unable = MemberState(False, 3), MemberState(False, 3, overlaps=False)
    assert conclude([able, able]).overlaps
    assert not conclude([able, unable]).overlaps


def test_a_speed_that_is_not_known_is_taken_for_the_slowest() -> None:
    assert conclude([at(3), at(3)]).speeds == ()
    words = [MemberState(False, 3, speed=8.0), MemberState(False, 3), MemberState(False, 3, speed=2.0)]
    assert conclude(words).speeds == (8.0, 2.0, 2.0)


def test_a_newcomer_that_followed_to_another_step_is_not_nursed() -> None:
    near, far = MemberState(True, 5, nursed=True), MemberState(True, 4, nursed=True)
    assert conclude([at(5), near, far, FRESH]).nursed == (1,)


def test_members_of_different_arithmetic_are_told_as_mixed() -> None:
    one, other = MemberState(False, 3, arithmetic=b"a"), MemberState(False, 3, arithmetic=b"b")
    assert not conclude([one, one]).mixed
    assert conclude([one, other]).mixed
