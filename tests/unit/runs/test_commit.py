"""Decision of a new group about the last step, from the states of its members."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.runs.commit import MemberState, decide_commit

FRESH = MemberState(True)
NONE: frozenset[int] = frozenset()


def at(done: int, held: str = "", units: tuple[int, ...] = (), ahead: tuple[int, ...] = ()) -> MemberState:
    """Build the report of a member that has a training state."""
    return MemberState(False, done, held.encode(), units, ahead=ahead)


@pytest.mark.parametrize(
    ("states", "done", "applies"),
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
def test_consistent_states_lead_to_one_decision(states: list[MemberState], done: int, applies: bool) -> None:
    """The order of the states changes nothing but the ranks."""
    for ordered in (states, states[::-1]):
        decision = decide_commit(ordered)
        assert (decision.done, decision.apply) == (done, applies)
        assert decision.donors == tuple(rank for rank, state in enumerate(ordered) if not state.fresh)
        assert decision.fresh == tuple(rank for rank, state in enumerate(ordered) if state.fresh)


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        pytest.param([at(5, "x"), at(7)], "have applied 5 and 7 steps", id="a gap of two steps"),
        pytest.param([at(5, "x"), at(6), at(7)], "have applied 5 and 7 steps", id="three steps in one group"),
        pytest.param([at(0, "x"), at(1000)], "have applied 0 and 1000 steps", id="a state of another run"),
        pytest.param([at(6), at(5)], "did not reach another", id="applied by one, not held by another"),
        pytest.param([at(6), at(5, "x"), at(5)], "did not reach another", id="not held by the third"),
        pytest.param([at(6), at(5, "x"), at(5, "y")], "did not reach another", id="held as two results"),
        pytest.param(
            [at(5, "", (1, 2)), at(5, "", (2, 3))],
            "micro-batch of step 5 is in the gradients",
            id="one micro-batch twice",
        ),
        pytest.param(
            [at(5, "x", (0,), (1,)), at(5, "x", (2,), (1,))],
            "micro-batch of step 6 is in the gradients",
            id="a unit of the next step in two sums",
        ),
        pytest.param(
            [at(6, "", (4,)), at(5, "x", (0,), (4,))],
            "micro-batch of step 6 is in the gradients",
            id="a unit in the sums of one member that is a step behind",
        ),
        pytest.param(
            [at(5, "", (1,), (7,)), at(5, "", (2,), (7,))],
            "micro-batch of step 6 is in the gradients",
            id="a unit computed ahead by two members while the step is repeated",
        ),
    ],
)
def test_contradicting_states_are_rejected(states: list[MemberState], reason: str) -> None:
    for ordered in (states, states[::-1]):
        with pytest.raises(ProtocolError, match=reason):
            decide_commit(ordered)


@pytest.mark.parametrize(
    ("states", "claimed", "ahead"),
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
def test_micro_batches_are_kept_for_their_own_step(
    states: list[MemberState], claimed: tuple[set[int], ...], ahead: tuple[set[int], ...]
) -> None:
    decision = decide_commit(states)
    assert decision.claimed == claimed
    assert decision.ahead == ahead


@given(
    st.lists(
        st.builds(at, st.integers(4, 7), st.sampled_from(["", "x", "y"]), st.sampled_from([(), (1,)])),
        min_size=1,
        max_size=4,
    )
)
def test_any_states_are_rejected_or_lead_to_a_reachable_step(states: list[MemberState]) -> None:
    """A member reaches the decided step if it has applied it or holds its one result."""
    try:
        decision = decide_commit(states)
    except ProtocolError:
        done = {state.done for state in states}
        units = [(state.done, unit) for state in states for unit in state.units]
        behind = [state.held for state in states if state.done == min(done)]
        has_gap = len(done) > 1 and (max(done) > min(done) + 1 or not all(behind) or len(set(behind)) > 1)
        assert has_gap or len(units) != len(set(units)), "a refusal has a reason"
        return
    behind = [state.held for state in states if state.done < decision.done]
    assert all(behind), "a member cannot apply what it does not hold"
    assert len(set(behind)) <= 1, "members apply the same bits"
    assert all(decision.done - 1 <= state.done <= decision.done for state in states)


def test_overlap_is_used_only_if_all_members_can() -> None:
    """A member on MPS cannot overlap; the others would assign the next round by other speeds."""
    able, unable = MemberState(False, 3), MemberState(False, 3, overlaps=False)
    assert decide_commit([able, able]).overlaps
    assert not decide_commit([able, unable]).overlaps


def test_unknown_speed_counts_as_the_slowest() -> None:
    assert decide_commit([at(3), at(3)]).speeds == ()
    states = [MemberState(False, 3, speed=8.0), MemberState(False, 3), MemberState(False, 3, speed=2.0)]
    assert decide_commit(states).speeds == (8.0, 2.0, 2.0)


def test_joining_worker_at_another_step_has_not_recovered_live() -> None:
    near, far = MemberState(True, 5, recovered_live=True), MemberState(True, 4, recovered_live=True)
    assert decide_commit([at(5), near, far, FRESH]).recovered_live == (1,)


def test_members_of_different_arithmetic_are_reported_as_mixed() -> None:
    first, second = MemberState(False, 3, arithmetic=b"a"), MemberState(False, 3, arithmetic=b"b")
    assert not decide_commit([first, first]).mixed
    assert decide_commit([first, second]).mixed
