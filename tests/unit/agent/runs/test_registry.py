"""What is believed of a machine's report of its own part in a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from barnraise.agent.runs.registry import RunRegistry
from barnraise.identity import NodeId
from barnraise.runs.record import WorkerState, sign_order
from tests.unit.runs.control.test_lifecycle import KEY, A, B, order, report


class FakeContext:
    """An agent of a cluster in which everybody but the first is what is said."""

    def __init__(self, role: str) -> None:
        self.me, self.incarnation, self.storage, self.log = KEY.id, bytes(16), self, self
        self._role = role

    def role(self, node: NodeId) -> str:
        return "owner" if node.raw == A else self._role

    def keep_run(self, name: str, value: bytes) -> None:
        return

    def linked_nodes(self) -> list[NodeId]:
        return []


@pytest.mark.parametrize("role", ["owner", "guest"])
def test_a_guest_sends_nobody_to_rest_and_commands_no_terminal(role: str) -> None:
    said = WorkerState(0, "running", words="\x1b[2J", rests=(A,), rests_in=1, rests_why="\x1b[2J")

    async def taken() -> WorkerState:
        context: Any = FakeContext(role)
        registry = RunRegistry(context)
        assert registry.apply(sign_order(order(), KEY))
        registry.apply_report(NodeId(B), report("running", said))
        return registry.runs["train-abcd"].reports[B].workers[0]

    found = asyncio.run(taken())
    if role == "owner":
        assert found == said
    else:
        assert (found.rests, found.rests_in, found.rests_why) == ((), 0, "")
        assert "\x1b" not in found.words
