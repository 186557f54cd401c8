"""Disk of a durable replica: what was saved comes back, for the same cluster only."""

from __future__ import annotations

from pathlib import Path

import pytest

from barnraise.agent.journal_storage import FILE_NAME, JournalStorage
from barnraise.agent_client.kv_messages import LOBBY, CompareAndSet, Namespace, PushToQueue, ReadQueue
from barnraise.core.errors import MembershipError
from barnraise.kvstore.journals import ID, JOURNALS, MAX_ENTRY_BYTES
from barnraise.kvstore.messages import (
    ReplicaAnswer,
    ReplicaState,
    ReplicaView,
    SavedReplica,
    UnsavedChange,
    ViewBallot,
)
from barnraise.kvstore.replica import KvReplica

CLUSTER, ME = b"c" * 32, b"m" * 32
SCOPE = Namespace("sweep", LOBBY)
QUEUE = "ab" * 16
STATE = ReplicaState(ViewBallot(1, 1, b"n"), ViewBallot(1, 1, b"n"), 3, 0, ())


def push(serial: int, value: bytes) -> PushToQueue:
    return PushToQueue(SCOPE, bytes(16), serial, b"", QUEUE, value)


class Machine:
    """One machine whose replica restarts with its disk."""

    def __init__(self, directory: Path) -> None:
        self.disk = JournalStorage(directory)
        self.view = ReplicaView(0, (ME,), frozenset({ME}))
        self.saves = 0
        self.start()
        self.do(CompareAndSet(SCOPE, b"o" * 16, 1, b"", ID, b"", QUEUE.encode()))

    def start(self) -> None:
        saved, number = self.disk.load(CLUSTER), self.view.number
        self.replica = KvReplica(
            ME,
            lambda view, agreeing: ME in agreeing,
            bytes([number]) * 16,
            last_view=number,
            rules=JOURNALS,
            saved=saved,
        )
        self.view = ReplicaView(number + 1, (ME,), frozenset({ME}))
        self.replica.on_view_change(self.view, 0.0)
        self.save()

    def save(self) -> None:
        change = self.replica.unsaved(whole=self.disk.wants_snapshot)
        if change is not None:
            self.disk.save(CLUSTER, change)
            self.saves += 1

    def do(self, operation: CompareAndSet | PushToQueue | ReadQueue) -> object:
        effects = self.replica.request(operation, "ticket", 0.0)
        self.save()
        (answer,) = effects
        assert isinstance(answer, ReplicaAnswer)
        return answer.result


def test_replica_continues_with_what_its_disk_has(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    results = [machine.do(push(serial, b"%d" % serial)) for serial in range(1, 6)]
    saves = machine.saves
    before = machine.do(ReadQueue(SCOPE, bytes(16), 9, b"", QUEUE, 0))
    assert machine.saves == saves, "a read needs no disk"
    machine.start()
    after = machine.do(ReadQueue(SCOPE, bytes(16), 9, b"", QUEUE, 0))
    assert (after.values, after.founding) == (before.values, before.founding)  # type: ignore[attr-defined]
    assert machine.do(push(5, b"again")) == results[-1], "a repeated write is recognised after a restart"
    machine.disk.close()
    machine.disk = JournalStorage(tmp_path)
    machine.start()
    machine.do(push(6, b"6"))
    assert machine.do(ReadQueue(SCOPE, bytes(16), 9, b"", QUEUE, 0)).values == tuple(
        b"123456"[n : n + 1] for n in range(6)
    )  # type: ignore[attr-defined]


def test_many_operations_are_replaced_by_a_snapshot(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    entry = bytes(MAX_ENTRY_BYTES)
    for serial in range(1, 40):
        machine.do(push(serial, entry))
    saved = machine.disk.load(CLUSTER)
    assert saved is not None
    assert len(saved.snapshot) > 30 * MAX_ENTRY_BYTES
    assert len(saved.operations) < 10
    machine.start()
    assert machine.do(ReadQueue(SCOPE, bytes(16), 99, b"", QUEUE, 0)).count == 39  # type: ignore[attr-defined]


def test_state_of_another_cluster_is_not_loaded(tmp_path: Path) -> None:
    disk = JournalStorage(tmp_path)
    assert disk.load(CLUSTER) is None
    disk.save(CLUSTER, UnsavedChange(STATE, ((1, push(1, b"x")),), None))
    assert disk.load(b"d" * 32) is None
    assert disk.load(CLUSTER) == SavedReplica(STATE, b"", ((1, push(1, b"x")),))
    disk.save(CLUSTER, UnsavedChange(STATE, (), b"snapshot"))
    assert disk.load(CLUSTER) == SavedReplica(STATE, b"snapshot", ())
    disk.save(b"d" * 32, UnsavedChange(STATE, (), b"other"))
    assert disk.load(CLUSTER) is None
    assert disk.load(b"d" * 32) == SavedReplica(STATE, b"other", ())


def test_change_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    disk = JournalStorage(tmp_path)
    disk.save(CLUSTER, UnsavedChange(STATE, ((1, push(1, b"x")),), None))
    pages = disk._base.execute("PRAGMA page_count").fetchone()[0]
    disk._base.execute(f"PRAGMA max_page_count={pages}")  # the disk is full
    with pytest.raises(MembershipError, match="full"):
        disk.save(CLUSTER, UnsavedChange(STATE, ((2, push(2, bytes(1 << 16))),), None))
    disk.close()
    assert JournalStorage(tmp_path).load(CLUSTER) == SavedReplica(STATE, b"", ((1, push(1, b"x")),))


def test_number_that_the_disk_cannot_hold_is_an_error(tmp_path: Path) -> None:
    disk = JournalStorage(tmp_path)
    disk.save(CLUSTER, UnsavedChange(STATE, ((1, push(1, b"x")),), None))
    with pytest.raises(MembershipError, match="cannot be used"):
        disk.save(CLUSTER, UnsavedChange(STATE, ((2**63, push(2, b"y")),), None))
    assert disk.load(CLUSTER) == SavedReplica(STATE, b"", ((1, push(1, b"x")),))


def test_damaged_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    (tmp_path / FILE_NAME).chmod(0o600)
    with pytest.raises(MembershipError) as caught:
        JournalStorage(tmp_path)
    assert "move it away" in caught.value.hint
    (tmp_path / FILE_NAME).unlink()
    disk = JournalStorage(tmp_path)
    disk._base.execute("INSERT INTO replica VALUES (1, ?, ?)", (CLUSTER, b"\xc1"))
    with pytest.raises(MembershipError, match="cannot be used"):
        disk.load(CLUSTER)
