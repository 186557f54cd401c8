"""Pauses over the control links: owners may, guests may not, and the paused machine names the origin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from barnraise.agent.limits import messages
from barnraise.agent.limits.messages import PauseAnswer, PauseOrder
from barnraise.agent.limits.policy import HostConditions, pause_reason
from barnraise.agent.limits.remote_pause import RemotePause
from barnraise.agent.limits.service import LimitsService
from barnraise.agent_client.machine_limits import MachineLimits, load_limits
from barnraise.core.errors import AgentError, ProtocolError
from barnraise.identity import NodeId

DESK, NAS = NodeId(bytes([1]) * 32), NodeId(bytes([2]) * 32)
NAMES = {DESK: "desk", NAS: "nas"}


class Pair:
    """Two agents whose messages reach each other at once."""

    def __init__(self, directory: Path, roles: dict[NodeId, str]) -> None:
        self.roles, self.directory, self.is_connected = roles, directory, True
        self.events: list[str] = []
        self.audited: list[tuple[str, dict[str, str]]] = []
        self.pauses = {node: self._agent(node) for node in NAMES}

    def _agent(self, me: NodeId) -> RemotePause:
        home = self.directory / NAMES[me]
        home.mkdir()
        context: Any = SimpleNamespace(
            me=me,
            directory=home,
            log=SimpleNamespace(role=self.roles.get),
            name_of=NAMES.__getitem__,
            connections=SimpleNamespace(get=lambda node: object() if self.is_connected else None),
            send_bulk=lambda node, message: self.pauses[node].received(me, memoryview(message)[1:]),
            report_event=self.events.append,
            audit=SimpleNamespace(write=lambda kind, **facts: self.audited.append((kind, facts))),
            machine_changed=lambda: None,
        )
        context.limits = LimitsService(context, lambda: True, lambda: None, metered=lambda: False)
        return RemotePause(context, lambda: (("train-1", "continues on the others"),))

    def limits(self, node: NodeId) -> MachineLimits:
        return load_limits(self.directory / NAMES[node])


def in_loop(make: Callable[[], Awaitable[str]]) -> str:
    async def main() -> str:
        return await asyncio.wait_for(make(), 20)

    return asyncio.run(main())


def test_owner_pauses_and_resumes_the_machine_of_another_owner(tmp_path: Path) -> None:
    async def orders() -> str:
        pair = Pair(tmp_path, {DESK: "owner", NAS: "owner"})
        done = await pair.pauses[DESK].order(NAS, paused=True)
        assert done == "nas: it is paused. Run train-1 continues on the others"
        assert pair.limits(NAS).paused
        assert not pair.limits(DESK).paused
        assert "desk paused this machine" in pair.events
        assert pair.audited == [("asked-by-owner", {"by": "desk", "detail": "paused this machine"})]
        reason = pause_reason(pair.limits(NAS), HostConditions(datetime.now().astimezone()), is_own_run=True)
        assert reason == "a person at desk paused it"
        assert await pair.pauses[DESK].order(NAS, paused=False) == "nas: runs may use it again"
        assert pair.limits(NAS) == MachineLimits()
        return "done"

    assert in_loop(orders) == "done"


def test_own_machine_is_paused_without_a_message(tmp_path: Path) -> None:
    async def orders() -> str:
        pair = Pair(tmp_path, {DESK: "owner", NAS: "owner"})
        pair.is_connected = False
        done = await pair.pauses[DESK].order(DESK, paused=True, until=4e9)
        assert pair.limits(DESK) == MachineLimits(paused=True, paused_until=4e9)
        return done

    assert in_loop(orders).startswith("it is paused")


@pytest.mark.parametrize(
    ("roles", "is_connected", "words"),
    [
        ({DESK: "owner", NAS: "guest"}, True, "nas is a guest"),
        ({DESK: "owner", NAS: "owner"}, False, "nas is not connected"),
    ],
)
def test_order_that_cannot_be_obeyed_is_refused(
    tmp_path: Path, roles: dict[NodeId, str], is_connected: bool, words: str
) -> None:
    async def order() -> str:
        pair = Pair(tmp_path, roles)
        pair.is_connected = is_connected
        with pytest.raises(AgentError, match=words):
            await pair.pauses[DESK].order(NAS, paused=True)
        assert not pair.limits(NAS).paused
        return "refused"

    assert in_loop(order) == "refused"


def test_guest_neither_pauses_others_nor_is_paused_by_them(tmp_path: Path) -> None:
    order = memoryview(messages.encode(PauseOrder(1, True)))[1:]

    async def orders() -> str:
        pair = Pair(tmp_path, {DESK: "guest", NAS: "owner"})
        with pytest.raises(ProtocolError, match="guest"):
            pair.pauses[NAS].received(DESK, order)
        assert not pair.limits(NAS).paused
        pair.roles.update({DESK: "owner", NAS: "guest"})
        pair.pauses[NAS].received(DESK, order)
        assert not pair.limits(NAS).paused
        return "refused"

    assert in_loop(orders) == "refused"


def test_answer_to_no_order_changes_nothing(tmp_path: Path) -> None:
    async def answer() -> str:
        pair = Pair(tmp_path, {DESK: "owner", NAS: "owner"})
        pair.pauses[DESK].received(NAS, memoryview(messages.encode(PauseAnswer(7, True, "")))[1:])
        return "ignored"

    assert in_loop(answer) == "ignored"
