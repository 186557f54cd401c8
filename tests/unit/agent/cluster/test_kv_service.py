"""Journals of one machine: what its agent accepts, and what it does when its disk is full."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from barnraise.agent import protocol
from barnraise.agent.cluster.kv_service import KvService
from barnraise.agent.journal_storage import JournalStorage
from barnraise.agent_client.kv_messages import (
    LOBBY,
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
from barnraise.core.errors import MembershipError, ProtocolError
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog
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

    async def push(self, serial: int, value: bytes = b"{}") -> Result:
        operation = PushToQueue(SCOPE, bytes(16), serial, b"", QUEUE, value)
        return await asyncio.wait_for(self.service.request(operation, 5.0), 20)

    async def count(self) -> int:
        result = await asyncio.wait_for(
            self.service.request(ReadQueue(SCOPE, bytes(16), 9, b"", QUEUE, 0), 5.0), 20
        )
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
        machine.disk._base.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?)", (b"\xc1",))
        machine.disk.close()
        with pytest.raises(MembershipError, match=r"journals.db cannot be used: a snapshot") as caught:
            machine.start()
        assert "move it away" in caught.value.hint

    asyncio.run(main())


def test_reset_for_another_cluster_forgets_the_journals(tmp_path: Path) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        await machine.push(1)
        machine.service.reset()
        machine.service.view_changed()
        assert await machine.count() == 0
        assert machine.disk.load(b"another") is None

    asyncio.run(main())


def test_messages_of_journals_have_a_kind_of_their_own(tmp_path: Path) -> None:
    async def main() -> None:
        machine = Machine(tmp_path)
        peer = NodeKey.generate().id
        reply = ClientReply(bytes(16), 1, KvDone(1, b""))
        machine.service._perform([ReplicaSend(peer.raw, reply)])
        ((node, message),) = machine.sent
        assert (node, message[:1]) == (peer, protocol.JOURNAL)
        assert decode_message(message[1:]) == reply

    asyncio.run(main())
