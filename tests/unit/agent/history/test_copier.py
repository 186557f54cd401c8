"""Three machines copy each other's logs: over reconnections, replaced logs and absent writers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import cast

import pytest

from barnraise.agent.context import AgentContext
from barnraise.agent.history import copier as copying
from barnraise.agent.history.copier import HistoryCopier
from barnraise.agent.history.disk_thread import DiskThread
from barnraise.agent.runs.messages import HistoryMessage, decode
from barnraise.history.entries import LogHead, NoteEntry
from barnraise.history.log_file import RunLogWriter, log_path, logs_of
from barnraise.identity import NodeId
from benchmarks.invented_run import DESK, MAC, NAS, RUN

NODES = (DESK, MAC, NAS)
CLUSTER = b"c" * 32


class FakeLog:
    cluster = CLUSTER

    def __init__(self, guests: set[bytes]) -> None:
        self.guests = guests

    def role(self, node: NodeId) -> str:
        return "guest" if node.raw in self.guests else "owner"


class FakeNetwork:
    """Agents with their copiers, and the links between them that are up."""

    def __init__(self, root: Path) -> None:
        self.guests: set[bytes] = set()
        self.cut: set[frozenset[bytes]] = set()
        self.sent: list[tuple[bytes, bytes]] = []
        self.disk = DiskThread()
        self.tasks: set[asyncio.Future[None]] = set()
        self.agents = {node: FakeContext(self, node, root / node.hex()[:2]) for node in NODES}

    def is_up(self, first: bytes, second: bytes) -> bool:
        return first != second and frozenset((first, second)) not in self.cut

    async def exchange(self) -> None:
        """Let every machine copy once from every other."""
        for context in self.agents.values():
            for node in context.linked_nodes():
                if context.log.role(context.me) == "owner" and context.log.role(node) == "owner":
                    await context.copier._copy_from(node)


class FakeContext:
    def __init__(self, network: FakeNetwork, node: bytes, directory: Path) -> None:
        self.me, self.directory, self.log = NodeId(node), directory, FakeLog(network.guests)
        self._network = network
        self.copier = HistoryCopier(cast(AgentContext, self), network.disk)

    def linked_nodes(self) -> list[NodeId]:
        return [NodeId(node) for node in NODES if self._network.is_up(self.me.raw, node)]

    def name_of(self, node: NodeId) -> str:
        return node.short

    def send_bulk(self, node: NodeId, message: bytes) -> None:
        if self._network.is_up(self.me.raw, node.raw):
            self._network.sent.append((self.me.raw, node.raw))
            receiver = self._network.agents[node.raw].copier
            receiver.received(self.me, cast(HistoryMessage, decode(memoryview(message)[1:])))

    def spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._network.tasks.add(task)

    def writer(self, cluster: bytes = CLUSTER) -> RunLogWriter:
        head = LogHead(RUN, self.me.raw, "agent", bytes(16), 1.0, cluster=cluster)
        return RunLogWriter(self.path(self.me.raw), head)

    def path(self, node: bytes) -> Path:
        return log_path(self.directory, RUN, node)

    def held(self) -> dict[bytes, bytes]:
        return {node: path.read_bytes() for node, path in logs_of(self.directory, RUN).items()}


def _notes(writer: RunLogWriter, count: int = 5, size: int = 20) -> None:
    for number in range(count):
        writer.append([NoteEntry(float(number), "x" * size)])


def test_three_machines_end_with_the_same_logs(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        for context in network.agents.values():
            _notes(context.writer(), 200, 3000)
        await network.exchange()
        desk, mac, nas = (context.held() for context in network.agents.values())
        assert desk == mac == nas
        assert set(desk) == set(NODES)

    asyncio.run(copy())


def test_reconnected_machine_gets_only_what_is_new(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, _, nas = network.agents.values()
        writer = desk.writer()
        _notes(writer, 100, 3000)
        await network.exchange()
        network.cut = {frozenset((DESK, NAS)), frozenset((MAC, NAS))}
        _notes(writer, 5)
        await network.exchange()
        assert nas.held() != desk.held()
        network.cut = set()
        network.sent.clear()
        await network.exchange()
        assert nas.held() == desk.held()
        assert len(network.sent) < 20

    asyncio.run(copy())


def test_log_of_an_absent_writer_comes_from_another_machine(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, nas = network.agents.values()
        _notes(desk.writer())
        network.cut = {frozenset((DESK, NAS))}
        await network.exchange()
        network.cut |= {frozenset((DESK, MAC))}
        await network.exchange()
        assert nas.held() == mac.held() == desk.held()

    asyncio.run(copy())


@pytest.mark.parametrize("change", ["replaced", "shrunk"])
def test_replaced_or_shrunk_log_is_copied_again(tmp_path: Path, change: str) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk = network.agents[DESK]
        writer = desk.writer()
        _notes(writer, 1)
        first = writer.size
        _notes(writer, 50, 1000)
        await network.exchange()
        if change == "shrunk":
            os.truncate(desk.path(DESK), first)
        else:
            writer._shrink()  # as when the log has become too large
        await network.exchange()
        for context in network.agents.values():
            assert context.held() == desk.held()

    asyncio.run(copy())


def test_guest_neither_reads_nor_writes_records_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_ANSWER_S", 0.3)  # an owner does not answer a guest

    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        for context in network.agents.values():
            _notes(context.writer())
        network.guests.add(NAS)
        guest = network.agents[NAS]
        await guest.copier._copy_from(NodeId(DESK))  # a guest that asks all the same
        await network.exchange()
        assert set(guest.held()) == {NAS}
        assert set(network.agents[DESK].held()) == {DESK, MAC}

    asyncio.run(copy())


def test_records_of_another_cluster_stay_where_they_are(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        _notes(network.agents[DESK].writer(cluster=b"d" * 32))
        _notes(network.agents[MAC].writer())
        await network.exchange()
        assert set(network.agents[NAS].held()) == {MAC}

    asyncio.run(copy())
