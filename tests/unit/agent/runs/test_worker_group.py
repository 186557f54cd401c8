"""What workers say of themselves to their agent."""

from __future__ import annotations

from typing import Any

from barnraise.agent.runs.worker_group import WorkerGroup
from barnraise.agent_client.run_requests import GroupRequest
from barnraise.identity import NodeKey
from barnraise.runs.record import RunRecord, WorkerSlot


def test_a_question_that_waited_long_takes_nothing_back() -> None:
    outfit: Any = None
    slots = (WorkerSlot(NodeKey.generate().id.raw, 0, "cpu", 3),)
    record = RunRecord(order=b"", signature=bytes(64), slots=slots)
    crew = WorkerGroup(outfit, record, [0], 3, lambda: None, lambda text: None)
    early = GroupRequest("train-abcd", 0, 3)
    late = GroupRequest("train-abcd", 0, 3, trained=True, words="pc")
    assert not crew.update_from(early)
    assert crew.update_from(late)
    assert not crew.update_from(late), "it is known"
    crew.set_state("waiting", early)  # it is answered after the other
    assert (crew.states[0].state, crew.states[0].trained, crew.states[0].words) == ("waiting", True, "pc")
    assert crew.update_from(early)
    assert (crew.states[0].trained, crew.states[0].words) == (True, "")
