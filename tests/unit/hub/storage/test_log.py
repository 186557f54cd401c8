"""Event log: a transaction is written completely or not at all, and named blobs exist."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from pathlib import Path

import pytest

from barnraise.core.errors import HubError
from barnraise.hub.protocol.invites import InviteGrant
from barnraise.hub.protocol.messages import SampleSpan, VersionStep
from barnraise.hub.rounds.leases import ActiveLease
from barnraise.hub.server.health import DiskLatency
from barnraise.hub.storage.blobs import BlobStore, hash_file
from barnraise.hub.storage.log import CommittedRound, Contribution, HubLog, HubLogWriter, MemberRecord, change
from barnraise.hub.storage.versions import named_blobs, replica_of, steps_after


def _version(number: int, *, base: bool = False) -> CommittedRound:
    step = VersionStep("base" if not number else "delta", number, f"{number:064x}", 10, "int8")
    base_step = VersionStep("base", number, f"{1000 + number:064x}", 25, "fp32") if base else None
    return CommittedRound(
        number=number, step=step, base=base_step, momentum=f"{2000 + number:064x}", samples=5
    )


def test_version_is_committed_once_with_contributions(tmp_path: Path) -> None:
    log = HubLog(tmp_path)
    part = Contribution(
        node="a",
        lease="l",
        samples=5,
        spans=(SampleSpan(0, 0, 5),),
        behind=0,
        weight=5.0,
        scale=1.0,
        sha256="x",
    )
    log.transact([change(HubLog.put_version, _version(0), [part])])
    with pytest.raises(HubError):
        log.transact([change(HubLog.delete_lease, "x"), change(HubLog.put_version, _version(0))])
    log.close()
    log = HubLog(tmp_path)
    assert [version.number for version in log.read().versions] == [0]
    assert log.contributions(0) == (part,)
    log.close()


def test_failed_transaction_writes_nothing(tmp_path: Path) -> None:
    log = HubLog(tmp_path)
    member = MemberRecord(node="a", name="ann", role="friend", since=0.0)

    def fail(log: HubLog) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(HubError, match="full"):
        log.transact([change(HubLog.put_member, member), fail])
    assert log.read().members == {}
    log.close()


def test_writer_rejects_writes_after_failure_until_resumed(tmp_path: Path) -> None:
    log = HubLog(tmp_path)

    def fail(log: HubLog) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def scene() -> None:
        writer = HubLogWriter(log, DiskLatency())
        member = change(HubLog.put_member, MemberRecord(node="a", name="ann", role="friend", since=0.0))
        results = await asyncio.gather(
            writer.write([member]), writer.write([fail]), writer.write([member]), return_exceptions=True
        )
        assert isinstance(results[1], HubError)
        with pytest.raises(HubError):
            await writer.write([member])
        writer.resume()
        await writer.write([member])
        writer.close()

    asyncio.run(scene())
    assert set(log.read().members) == {"a"}
    log.close()


@pytest.mark.skipif(sys.platform == "win32", reason="modes are Unix'")
def test_log_is_readable_by_owner_only(tmp_path: Path) -> None:
    log = HubLog(tmp_path)
    log.put_member(MemberRecord(node="a", name="ann", role="friend", since=0.0))
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    log.close()
    assert modes == {0o600}


def test_newer_log_is_not_changed(tmp_path: Path) -> None:
    HubLog(tmp_path).close()
    with sqlite3.connect(tmp_path / "hub.db") as base:
        base.execute("PRAGMA user_version=99")
    base.close()
    with pytest.raises(HubError, match="newer"):
        HubLog(tmp_path)


def test_blobs_are_named_by_content_and_orphans_are_swept(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    name, other = blobs.put(b"hello"), blobs.put(b"orphan")
    assert blobs.put(b"hello") == name
    assert hash_file(blobs.path(name)) == name
    with blobs.partial() as draft:
        draft.write(b"never kept")
    (tmp_path / "drafts" / "left").write_bytes(b"by a crash")
    assert blobs.sweep({name}) == 1
    assert not blobs.has(other)
    assert list(blobs.names()) == [name]
    assert not os.listdir(tmp_path / "drafts")
    for trick in ("../../etc/passwd", name.upper(), name + "0", ""):
        with pytest.raises(HubError):
            blobs.path(trick)


def test_full_disk_is_reported(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    with pytest.raises(HubError, match="space"), blobs.partial():
        raise OSError(28, "No space left on device")
    assert not os.listdir(tmp_path / "drafts")


def test_steps_after_lead_to_head() -> None:
    versions = [_version(number, base=number % 4 == 0) for number in range(10)]
    assert steps_after(versions, 9) == ()
    assert [step.version for step in steps_after(versions, 7)] == [8, 9]
    assert {step.kind for step in steps_after(versions, 7)} == {"delta"}
    for after in (None, 2, 77):
        steps = steps_after(versions, after)
        assert [(step.kind, step.version) for step in steps] == [("base", 8), ("delta", 9)]
    assert [step.kind for step in steps_after(versions, 4)] == ["base", "delta"], (
        "five deltas would be larger"
    )
    named = named_blobs(versions)
    assert versions[9].momentum in named
    assert versions[8].momentum not in named
    assert versions[3].step.sha256 not in named
    assert versions[5].step.sha256 in named


def test_replica_is_consistent_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that is committed while the replica is read is completely in it, or not at all."""
    log, writer = HubLog(tmp_path), HubLog(tmp_path)
    lease = ActiveLease("l", "a", 0, (SampleSpan(0, 0, 5),), 1.0, 0.0, 0.0)
    writer.transact([change(HubLog.put_version, _version(0, base=True)), change(HubLog.put_lease, lease)])
    grant = InviteGrant(key="A" * 69, role="friend", uses=1, expires=9)
    read_all, tables = HubLog._all, []

    def committed_meanwhile(self: HubLog, table: str, order: str, kind: type) -> tuple[object, ...]:
        tables.append(table)
        if table == "version":
            changes = [change(HubLog.put_version, _version(1)), change(HubLog.delete_lease, "l")]
            writer.transact([*changes, change(HubLog.put_grant, grant)])
        return read_all(self, table, order, kind)

    monkeypatch.setattr(HubLog, "_all", committed_meanwhile)
    replica = replica_of(log, None)
    monkeypatch.undo()
    assert {"version", "grants"} <= set(tables)
    assert [version.number for version in replica.versions] == [0]
    assert (replica.leases, replica.grants) == ((lease,), ())
    after = replica_of(log, None)
    assert ([version.number for version in after.versions], after.leases, after.grants) == (
        [0, 1],
        (),
        (grant,),
    )
    log.close()
    writer.close()
