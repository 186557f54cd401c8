"""Three machines copy each other's logs: over reconnections, replaced logs and absent writers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import cast

import pytest

from barnraise.agent.context import AgentContext
from barnraise.agent.history import copier as copying
from barnraise.agent.history.copier import HistoryCopier
from barnraise.agent.history.disk_thread import DiskThread
from barnraise.agent.history.kept_logs import remove_oldest
from barnraise.agent.history.removals import RemovedRecords
from barnraise.agent.runs.messages import HistoryMessage, decode
from barnraise.core.config import RunSettings, Settings
from barnraise.history.entries import LogHead, NoteEntry
from barnraise.history.log_file import RunLogWriter, history_directory, log_path, logs_of
from barnraise.history.logs.retention import MOST_REMOVALS, RemovedRecord, removal
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


class FakeStorage:
    def __init__(self) -> None:
        self.stored: list[tuple[float, str]] = []

    def removals(self) -> list[tuple[float, str]]:
        return self.stored

    def keep_removals(self, removals: Iterable[tuple[float, str]]) -> None:
        self.stored = list(removals)


class FakeContext:
    def __init__(self, network: FakeNetwork, node: bytes, directory: Path) -> None:
        self.me, self.directory, self.log = NodeId(node), directory, FakeLog(network.guests)
        self._network = network
        self.storage, self.settings = FakeStorage(), Settings()
        self.active: set[str] = set()
        self.start()

    def start(self) -> None:
        """Start the copier, as after a restart of the agent."""
        self.removals = RemovedRecords(self.storage)
        context, active = cast(AgentContext, self), lambda: self.active
        self.copier = HistoryCopier(context, self._network.disk, self.removals, active)

    async def remove(self, now: float = 100.0) -> None:
        """Remove the record, as a person does."""
        self.removals.add([removal(RUN, now, [1.0])])
        await self.copier.remove_named()

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

    def writer(self, cluster: bytes = CLUSTER, run: str = RUN) -> RunLogWriter:
        head = LogHead(run, self.me.raw, "agent", bytes(16), 1.0, cluster=cluster)
        return RunLogWriter(log_path(self.directory, run, self.me.raw), head)

    def path(self, node: bytes) -> Path:
        return log_path(self.directory, RUN, node)

    def held(self, run: str = RUN) -> dict[bytes, bytes]:
        return {node: path.read_bytes() for node, path in logs_of(self.directory, run).items()}

    def runs(self) -> list[str]:
        return sorted(path.name for path in history_directory(self.directory).iterdir())


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


def test_removed_record_does_not_come_back(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, nas = network.agents.values()
        now = time.time()
        for context in (desk, mac):
            _notes(context.writer())
        _notes(desk.writer(run="other"))
        await network.exchange()
        network.cut = {frozenset((DESK, NAS)), frozenset((MAC, NAS))}  # the nas is off
        await mac.remove(now)
        await network.exchange()
        assert mac.held() == desk.held() == {}
        assert set(nas.held()) == {DESK, MAC}
        network.cut = {frozenset((DESK, MAC)), frozenset((MAC, NAS))}  # now the mac is off
        desk.start()  # its agent was restarted
        await network.exchange()
        network.cut = set()
        await network.exchange()
        for context in (desk, mac, nas):
            assert context.runs() == ["other"]
            assert context.held("other").keys() == {DESK}

    asyncio.run(copy())


def test_own_log_of_a_machine_that_was_off_is_removed_when_it_returns(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, nas = network.agents.values()
        network.cut = {frozenset((DESK, NAS)), frozenset((DESK, MAC))}
        _notes(desk.writer())
        _notes(mac.writer())
        await nas.remove(time.time())
        await network.exchange()
        assert mac.held() == nas.held() == {}
        network.cut = set()
        await network.exchange()
        await network.exchange()
        assert desk.held() == mac.held() == nas.held() == {}

    asyncio.run(copy())


def test_record_of_an_active_run_is_removed_after_its_end(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, nas = network.agents.values()
        _notes(desk.writer())
        await network.exchange()
        desk.active.add(RUN)  # this side of the network does not know that the run was stopped
        await nas.remove(time.time())
        await network.exchange()
        assert set(desk.held()) == {DESK}
        assert mac.held() == nas.held() == {}
        desk.active.clear()
        await desk.copier.remove_named()
        assert desk.held() == {}

    asyncio.run(copy())


def test_later_run_of_the_same_name_keeps_its_record(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, nas = network.agents.values()
        await nas.remove(time.time() - 100_000)
        _notes(desk.writer())
        await network.exchange()
        assert desk.held() == mac.held() == nas.held() != {}

    asyncio.run(copy())


def test_removals_of_a_guest_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_ANSWER_S", 0.3)

    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, nas = network.agents.values()
        _notes(desk.writer())
        network.guests.add(NAS)
        await nas.remove(time.time())
        await network.exchange()
        assert set(desk.held()) == set(mac.held()) == {DESK}

    asyncio.run(copy())


def test_all_machines_remember_the_same_newest_removals(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, nas = network.agents.values()
        desk.removals.add(RemovedRecord(float(number), f"a{number}") for number in range(0, 2000, 2))
        nas.removals.add(RemovedRecord(float(number), f"a{number}") for number in range(1, 2000, 2))
        await network.exchange()
        await network.exchange()
        newest = {(float(number), f"a{number}") for number in range(2000 - MOST_REMOVALS, 2000)}
        for context in (desk, mac, nas):
            assert set(context.storage.stored) == newest
        network.sent.clear()
        await network.exchange()
        assert len(network.sent) == 12, "nothing but a question and an answer for each pair"

    asyncio.run(copy())


def test_record_that_was_too_much_for_a_disk_is_not_copied_again(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, _ = network.agents.values()
        network.cut = {frozenset((DESK, NAS)), frozenset((MAC, NAS))}
        for age, run in enumerate(["newest", "middle", "oldest"]):
            writer = desk.writer(run=run)
            _notes(writer, 20, 1000)
            os.utime(log_path(desk.directory, run, DESK), (1e9 - age, 1e9 - age))
        limit = 2 * writer.size + 100
        mac.settings = Settings(runs=RunSettings(history_bytes=limit))
        for _ in range(3):
            await network.exchange()
            assert mac.runs() == ["middle", "newest"]
            assert remove_oldest(mac.directory, limit, ()) == []
        _notes(desk.writer(run="later"), 20, 1000)  # its file changes now
        await network.exchange()
        assert remove_oldest(mac.directory, limit, ()) == ["middle"]
        await network.exchange()
        assert mac.runs() == ["later", "newest"]

    asyncio.run(copy())


def test_log_that_cannot_be_copied_does_not_keep_others_back(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, _ = network.agents.values()
        large = desk.writer(run="large")
        large._max_bytes = 1 << 30
        _notes(large, 100, 110_000)
        _notes(desk.writer(run="small"))
        await network.exchange()
        assert "small" in mac.runs()

    asyncio.run(copy())


def test_copy_that_a_person_deleted_is_copied_whole(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, _ = network.agents.values()
        writer = desk.writer()
        _notes(writer)
        await network.exchange()
        mac.path(DESK).unlink()
        _notes(writer)
        await network.exchange()
        assert mac.held() == desk.held()

    asyncio.run(copy())


def test_slow_machine_does_not_delay_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_EVERY_S", 0.01)

    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, nas = network.agents.values()
        nas.copier.received = lambda node, message: None  # type: ignore[method-assign]
        _notes(mac.writer())
        running = asyncio.ensure_future(desk.copier.run())
        deadline = time.monotonic() + 5
        while MAC not in desk.held():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        writer = mac.writer()
        _notes(writer)  # the next round does not wait for the nas either
        while desk.held()[MAC] != mac.held()[MAC]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(copy())


def test_log_that_two_machines_have_is_copied_from_one_at_a_time(tmp_path: Path) -> None:
    async def copy() -> None:
        network = FakeNetwork(tmp_path)
        desk, mac, nas = network.agents.values()
        network.cut = {frozenset((DESK, NAS))}
        _notes(desk.writer(), 100, 3000)
        await network.exchange()
        desk.writer()._shrink()
        await mac.copier._copy_from(NodeId(DESK))
        network.cut = {frozenset((DESK, MAC)), frozenset((DESK, NAS))}
        _notes(mac.writer(), 100, 3000)
        copies = (nas.copier._copy_from(NodeId(MAC)), nas.copier._copy_from(NodeId(MAC)))
        await asyncio.gather(*copies)
        assert nas.held() == mac.held()

    asyncio.run(copy())
