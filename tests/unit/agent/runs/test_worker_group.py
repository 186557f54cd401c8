"""States that workers report to their agent."""

from __future__ import annotations

from typing import Any

from barnraise.agent.runs.worker_group import WorkerGroup
from barnraise.agent_client.run_requests import GroupRequest
from barnraise.identity import NodeKey
from barnraise.runs.record import RunRecord, WorkerSlot


def test_set_state_of_old_request_keeps_newer_facts() -> None:
    config: Any = None
    slots = (WorkerSlot(NodeKey.generate().id.raw, 0, "cpu", 3),)
    record = RunRecord(order=b"", signature=bytes(64), slots=slots)
    group = WorkerGroup(config, record, [0], 3, lambda: None, lambda text: None)
    early = GroupRequest("train-abcd", 0, 3)
    late = GroupRequest("train-abcd", 0, 3, trained=True, words="pc")
    assert not group.update_from(early)
    assert group.update_from(late)
    assert not group.update_from(late), "it is known"
    group.set_state("waiting", early)  # it is answered after the other
    assert (group.states[0].state, group.states[0].trained, group.states[0].wait_reason) == (
        "waiting",
        True,
        "pc",
    )
    assert group.update_from(early)
    assert (group.states[0].trained, group.states[0].wait_reason) == (True, "")
