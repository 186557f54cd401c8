"""The supervisor's pure decisions: when to terminate, to kill and to report."""

from __future__ import annotations

import pytest

from barnraise.agent.supervisor.messages import Stop, SupervisorNote, WorkerExited
from barnraise.agent.supervisor.policy import (
    STUCK_S,
    Effect,
    InputEnded,
    PolicyEvent,
    SendKill,
    SendTerminate,
    Supervision,
    TimePassed,
    decide,
    next_deadline,
)


def _after(state: Supervision, *events: tuple[PolicyEvent, float]) -> tuple[Supervision, list[Effect]]:
    effects: list[Effect] = []
    for event, now in events:
        state, more = decide(state, event, now)
        effects += more
    return state, effects


def test_repeated_stop_does_not_extend_grace() -> None:
    begin = Supervision(frozenset({0, 1}), 10.0)
    state, effects = _after(begin, (Stop(), 100.0), (Stop(), 109.0), (TimePassed(), 109.9))
    assert effects == [SendTerminate((0, 1))]
    assert next_deadline(state) == 110.0
    state, effects = _after(state, (WorkerExited(0, 0, None, 109.95, b""), 109.95), (TimePassed(), 110.0))
    assert effects[1] == SendKill((1,))
    assert isinstance(effects[2], SupervisorNote)
    assert "rank 1" in effects[2].text


def test_failed_worker_is_only_reported() -> None:
    state, effects = _after(Supervision(frozenset({0, 1}), 10.0), (WorkerExited(0, 1, None, 5.0, b""), 5.0))
    assert effects == [WorkerExited(0, 1, None, 5.0, b"")]
    assert state.running == {1}
    assert next_deadline(state) is None


def test_stop_of_ranks_kills_only_them() -> None:
    state, effects = _after(Supervision(frozenset({0, 1}), 10.0), (Stop(ranks=(1, 7)), 5.0))
    assert effects == [SendKill((1,))]
    assert next_deadline(state) is None


@pytest.mark.parametrize("reason", [InputEnded(), Stop(hard=True)])
def test_input_ended_kills_and_survivors_are_reported_once(reason: PolicyEvent) -> None:
    state, effects = _after(Supervision(frozenset({3}), 10.0), (Stop(), 0.0), (reason, 1.0))
    assert effects == [SendTerminate((3,)), SendKill((3,))]
    state, effects = _after(
        state, (Stop(), 2.0), *((TimePassed(), STUCK_S + late) for late in (0.5, 1.0, 20.0))
    )
    (note,) = effects
    assert isinstance(note, SupervisorNote)
    assert "rank 3" in note.text
