"""Journals of one machine: what its agent accepts, and what it does when its disk is full."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from barnraise.agent import protocol
from barnraise.agent.cluster.kv_service import KvService
from barnraise.agent.daemon import Agent
from barnraise.agent.journal_storage import JournalStorage
from barnraise.agent_client.kv_messages import (
    LOBBY,
    CompareAndSet,
    DropNamespace,
    KvDenied,
    KvDone,
    Namespace,
    Operation,
    PopFromQueue,
    PushToQueue,
    ReadQueue,
    Result,
    SetKey,
)
from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.core.errors import MembershipError, ProtocolError
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.kvstore.journals import ID
from barnraise.kvstore.messages import (
    ClientReply,
    ForwardedRequest,
    ReplicaSend,
    decode_message,
    encode_message,
)
from barnraise.membership.consensus.certificate import CertifiedDecision
from barnraise.membership.consensus.paxos import founded
from barnraise.membership.history import StoredHistory
from barnraise.membership.node import MembershipNode
from barnraise.membership.view import MembershipView, PresentMember, decide, first

SCOPE = Namespace("default", LOBBY)
QUEUE = "ab" * 16
INCARNATION = bytes(16)


class Machine:
    """A machine that founded its cluster, with the real membership and the real disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.has_journal = False
        self.key = NodeKey.generate()
        log = TrustLog.found(self.key, "pc")
        stored = StoredHistory(founded(first(self.key.id.raw, INCARNATION, len(log))), log)
        me = PresentMember(self.key.id.raw, INCARNATION)
        self.sent: list[tuple[NodeId, bytes]] = []
        self.events: list[str] = []
        self.context: Any = SimpleNamespace(
            me=self.key.id,
            log=log,
            member=MembershipNode(me, self.key, stored, random.Random(1), 0.0),
            name_of=lambda node: node.short,
            send_bulk=lambda node, message: self.sent.append((node, message)),
            report_event=self.events.append,
        )
        self.start()

    def start(self) -> None:
        self.disk = JournalStorage(self.directory)
        self.service = KvService(self.context, self.disk)
        self.service.view_changed()

    async def push(self, serial: int, value: bytes = b"{}") -> Result:
        if not self.has_journal:
            self.has_journal = True
            await self.do(CompareAndSet(SCOPE, b"o" * 16, 1, b"", ID, b"", QUEUE.encode()))
        return await self.do(PushToQueue(SCOPE, bytes(16), serial, b"", QUEUE, value))

    async def do(self, operation: Operation) -> Result:
        return await asyncio.wait_for(self.service.request(operation, 5.0), 20)

    async def count(self) -> int:
        result = await self.do(ReadQueue(SCOPE, bytes(16), 9, b"", QUEUE, 0))
        assert isinstance(result, KvDone)
        return result.count

    def receive(self, sender: NodeId, operation: Operation) -> None:
        self.service.received(sender, encode_message(ForwardedRequest(bytes(16), 7, operation)))


def test_entry_that_an_owner_forwards_is_appended(tmp_path: Path) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        assert isinstance(await machine.push(1), KvDone)
        other = bytes([1]) * 16
        operation = PushToQueue(SCOPE, other, 1, b"", QUEUE, b"{}")
        machine.receive(machine.key.id, operation)
        assert await machine.count() == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    "operation",
    [
        SetKey(Namespace("run", 3), bytes(16), 1, b"", "key", b"value"),
        SetKey(SCOPE, bytes(16), 1, b"", "key", b"value"),
        PopFromQueue(SCOPE, bytes(16), 1, b"", QUEUE),
        PushToQueue(Namespace("../x", LOBBY), bytes(16), 1, b"", QUEUE, b"{}"),
        PushToQueue(SCOPE, bytes(16), 1, b"", "x" * 1000, b"{}"),
        DropNamespace(Namespace("default", 4), bytes(16), 1, b""),
    ],
    ids=lambda operation: type(operation).__name__,
)
def test_forwarded_operation_that_is_no_journals_is_rejected(tmp_path: Path, operation: Operation) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        with pytest.raises(ProtocolError, match="not one of a journal"):
            machine.receive(machine.key.id, operation)
        assert machine.service._replica._log.store.namespaces == ()
        await machine.service.stop()

    asyncio.run(main())


def test_messages_of_machines_that_are_no_owners_are_rejected(tmp_path: Path) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        with pytest.raises(ProtocolError, match="holds no replica of the journal"):
            machine.receive(NodeKey.generate().id, PushToQueue(SCOPE, bytes(16), 1, b"", QUEUE, b"{}"))
        for data in (b"", b"\xff" * 200, b"\x91" * 100_000 + b"\xc0", bytes(2 << 20)):
            with pytest.raises(ProtocolError):
                machine.service.received(machine.key.id, data)
        assert await machine.count() == 0

    asyncio.run(main())


def test_full_disk_stops_the_journals_of_this_machine_only(tmp_path: Path) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.push(1)
        pages = machine.disk._base.execute("PRAGMA page_count").fetchone()[0]
        machine.disk._base.execute(f"PRAGMA max_page_count={pages}")
        for serial in (2, 3):
            denied = await machine.push(serial, bytes(100_000))
            assert isinstance(denied, KvDenied)
            assert (denied.reason, "full" in denied.message) == ("late", True)
            assert "disk space" in denied.hint
        assert len(machine.events) == 1
        assert "journals of this machine stop" in machine.events[0]
        assert machine.sent == []
        machine.disk.close()
        machine.start()  # the person has freed space, and started the agent again
        assert await machine.count() == 1
        assert isinstance(await machine.push(2), KvDone)

    asyncio.run(main())


def test_machine_of_a_view_that_was_missed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.kvstore.replica._FORMER_MEMBERS_S", 0.0)

    async def main() -> None:
        machine = Machine(tmp_path)
        assert isinstance(await machine.push(1), KvDone)
        machine.disk.close()
        peer, log = NodeKey.generate().id, machine.context.log
        log = machine.context.log = log.extended(log.admit(machine.key, peer, "owner", "laptop"))
        me, other = PresentMember(machine.key.id.raw, INCARNATION), PresentMember(peer.raw, bytes(16))
        chain = list(machine.context.member.history.chain)
        for members in ((other,), (other, me), (me,)):
            before = chain[-1].decision
            view = MembershipView(members, len(log), ())
            chain.append(CertifiedDecision(decide(before, before.digest, view)))
        stored = StoredHistory(founded(chain[-1].decision), log, tuple(chain))
        machine.context.member = MembershipNode(me, machine.key, stored, random.Random(1), 0.0)
        machine.start()
        ticks = asyncio.create_task(machine.service.run())
        operation = PushToQueue(SCOPE, bytes(16), 2, b"", QUEUE, b"{}")
        denied = await asyncio.wait_for(machine.service.request(operation, 1.0), 20)
        ticks.cancel()
        assert isinstance(denied, KvDenied)
        assert f"waits for {peer.short}" in denied.message

    asyncio.run(main())


def test_damaged_snapshot_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.service.stop()
        machine.disk._base.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?)", (b"\xc1",))
        machine.disk.close()
        with pytest.raises(MembershipError, match=r"journals.db cannot be used: a snapshot") as caught:
            machine.start()
        assert "move it away" in caught.value.hint

    asyncio.run(main())


def test_nothing_is_saved_before_the_agent_is_alone_in_its_directory(tmp_path: Path) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.push(1)
        cluster = machine.context.log.cluster
        before = machine.disk.load(cluster)
        disk = JournalStorage(tmp_path)
        second = KvService(machine.context, disk)  # of an agent that will find that the first one runs
        await second.stop()
        disk.close()
        assert before is not None
        assert machine.disk.load(cluster) == before

    asyncio.run(main())


def test_agent_loads_what_one_that_is_just_stopping_has_saved_last(tmp_path: Path) -> None:
    # A port of its own for discovery: agents of other tests must not be found.
    network = NetworkSettings(port=0, discovery_port=52996, addresses=("127.0.0.1",))
    settings = Settings(state=StateSettings(directory=str(tmp_path)), network=network)

    def push(serial: int) -> PushToQueue:
        return PushToQueue(SCOPE, bytes(16), serial, b"", QUEUE, b"{}")

    async def main() -> None:
        first, second = Agent(settings), Agent(settings)
        await first.start()
        await first.journals.request(CompareAndSet(SCOPE, b"o" * 16, 1, b"", ID, b"", QUEUE.encode()), 20.0)
        start = asyncio.create_task(second.start())
        await asyncio.sleep(0.2)
        assert isinstance(await first.journals.request(push(1), 20.0), KvDone)
        assert not start.done()
        await first.stop()
        await start
        done = await second.journals.request(push(2), 20.0)
        assert isinstance(done, KvDone), done
        assert done.count == 2
        await second.stop()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(asyncio.wait_for(main(), 60))


def test_reset_for_another_cluster_forgets_the_journals(tmp_path: Path) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.push(1)
        cluster = machine.context.log.cluster
        machine.context.log = SimpleNamespace(cluster=b"another", role=machine.context.log.role)
        machine.service.reset()
        assert machine.disk.load(b"another") is None
        machine.service.view_changed()
        assert await machine.count() == 0
        assert machine.disk.load(cluster) is None
        saved = machine.disk.load(b"another")
        assert saved is not None
        assert saved.operations == ()
        assert QUEUE.encode() not in saved.snapshot

    asyncio.run(main())


def test_full_disk_does_not_interrupt_the_move_to_another_cluster(tmp_path: Path) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.push(1)
        machine.disk._base.execute("PRAGMA query_only=1")  # every write fails
        machine.service.reset()
        machine.service.view_changed()
        denied = await machine.push(2)
        assert isinstance(denied, KvDenied)
        assert "cannot be used" in denied.message
        assert len(machine.events) == 1

    asyncio.run(main())


class SlowDisk:
    """Lets the saves of a machine wait until the test opens the gate."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.under_way = threading.Event(), threading.Event()
        self.saves = 0
        self._save = machine.disk.save
        monkeypatch.setattr(machine.disk, "save", self.save)

    def save(self, *change: Any) -> None:
        self.under_way.set()
        assert self.gate.wait(20)
        self._save(*change)
        self.saves += 1


def test_slow_disk_holds_messages_and_answers_but_not_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.push(1)
        disk = SlowDisk(machine, monkeypatch)
        first = asyncio.create_task(machine.push(2))
        while not disk.under_way.is_set():  # the loop turns while the disk is busy
            await asyncio.sleep(0.001)
        rest = [asyncio.create_task(machine.push(serial)) for serial in (3, 4, 5)]
        count = asyncio.create_task(machine.count())
        reply = ClientReply(bytes(16), 1, KvDone(1, b""))
        for _ in range(3):
            machine.service._perform([ReplicaSend(machine.key.id.raw, reply)])
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in (first, *rest, count))
        assert machine.sent == []
        disk.gate.set()
        results = await asyncio.gather(first, *rest)
        assert [getattr(result, "count", None) for result in results] == [2, 3, 4, 5]
        assert await count == 5
        assert len(machine.sent) == 3
        assert disk.saves == 2, "what comes during a save is saved together"
        await machine.service.stop()
        machine.disk.close()
        machine.start()
        assert await machine.count() == 5

    asyncio.run(main())


def test_wait_for_a_slow_disk_ends_in_time_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.push(1)
        disk = SlowDisk(machine, monkeypatch)
        ticks = asyncio.create_task(machine.service.run())
        operation = PushToQueue(SCOPE, bytes(16), 2, b"", QUEUE, b"{}")
        denied = await asyncio.wait_for(machine.service.request(operation, 0.3), 10)
        assert isinstance(denied, KvDenied)
        assert denied.reason == "late"
        assert "wait for the disk of this machine" in denied.message
        disk.gate.set()
        done = await machine.do(operation)
        assert isinstance(done, KvDone)
        assert done.count == 2, "the entry is there once"
        ticks.cancel()

    asyncio.run(main())


def test_agent_that_stops_waits_for_its_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.push(1)
        disk = SlowDisk(machine, monkeypatch)
        push = asyncio.create_task(machine.push(2))
        await asyncio.sleep(0.01)
        stop = asyncio.create_task(machine.service.stop())
        denied = await push
        assert isinstance(denied, KvDenied)
        assert "stops" in denied.message
        assert not stop.done()
        disk.gate.set()
        await stop
        assert disk.saves == 1
        machine.disk.close()
        machine.start()
        assert await machine.count() == 2

    asyncio.run(main())


def test_save_of_the_old_cluster_releases_nothing_in_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.push(1)
        disk = SlowDisk(machine, monkeypatch)
        push = asyncio.create_task(machine.push(2))
        await asyncio.sleep(0.01)
        reply = ClientReply(bytes(16), 1, KvDone(1, b""))
        machine.service._perform([ReplicaSend(machine.key.id.raw, reply)])
        machine.context.log = SimpleNamespace(cluster=b"another", role=machine.context.log.role)
        machine.service.reset()
        machine.service.view_changed()
        denied = await push
        assert isinstance(denied, KvDenied)
        assert denied.reason == "late"
        disk.gate.set()
        assert await machine.count() == 0
        assert machine.sent == []
        assert machine.disk.load(b"another") is not None

    asyncio.run(main())


def test_messages_of_journals_have_a_kind_of_their_own(tmp_path: Path) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.push(1)
        peer = NodeKey.generate().id
        reply = ClientReply(bytes(16), 1, KvDone(1, b""))
        machine.service._perform([ReplicaSend(peer.raw, reply)])
        ((node, message),) = machine.sent
        assert (node, message[:1]) == (peer, protocol.JOURNAL)
        assert decode_message(message[1:]) == reply

    asyncio.run(main())
