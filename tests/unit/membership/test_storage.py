"""Membership storage: private, and synced before any reply."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from barnraise.core.errors import IdentityError, MembershipError
from barnraise.identity import NodeKey
from barnraise.identity.trust import TrustLog, encode_entry
from barnraise.membership.consensus.certificate import CertifiedDecision
from barnraise.membership.consensus.paxos import AcceptorState, PaxosBallot, PaxosDecision, founded
from barnraise.membership.effects import SaveState
from barnraise.membership.storage import FILE_NAME, MembershipStorage
from barnraise.membership.view import first
from tests.repository import ROOT
from tests.unit.membership.power_cut import Disk, trace


def _record(number: int = 0) -> AcceptorState:
    record = founded(first(bytes(32), bytes(16), 1))
    return AcceptorState(record.decided, record.digest, PaxosBallot(number, bytes(32)))


def _link(number: int, branch: int = 0) -> CertifiedDecision:
    return CertifiedDecision(PaxosDecision(branch, number, bytes(32), (bytes(32),), b""))


def test_storage_returns_saved_state_after_reopen(tmp_path: Path) -> None:
    key = NodeKey.generate()
    log = TrustLog.found(key, "one")
    longer = log.extended(log.admit(key, NodeKey.generate().id, "owner", "two"))
    storage = MembershipStorage(tmp_path)
    assert storage.record() is None
    assert storage.log() is None
    assert storage.history() is None
    storage.save(SaveState(_record(1), 0, tuple(map(encode_entry, log.entries))))
    storage.save(SaveState(_record(2), 1, (encode_entry(longer.entries[1]),)))
    storage.keep_fact("name", b"mac")
    storage.close()
    again = MembershipStorage(tmp_path)
    assert again.record() == _record(2)
    assert again.log() == longer
    assert again.fact("name") == b"mac"
    assert again.fact("other") is None
    again.replace_cluster(_record(3), tuple(map(encode_entry, log.entries)))
    assert again.log() == log
    again.close()


def test_storage_keeps_one_chain_and_all_removals(tmp_path: Path) -> None:
    """A branch replaces the decisions after its beginning; a removal is never forgotten."""
    key = NodeKey.generate()
    log = TrustLog.found(key, "one")
    storage = MembershipStorage(tmp_path)
    storage.save(SaveState(_record(1), 0, tuple(map(encode_entry, log.entries))))
    links = [_link(number) for number in range(1, 6)]
    storage.save(SaveState(_record(1), links=tuple(links), removed=frozenset({b"x" * 32})))
    branch = _link(4, branch=1)
    storage.save(SaveState(_record(1), links=(branch,), removed=frozenset({b"x" * 32, b"y" * 32})))
    storage.close()
    again = MembershipStorage(tmp_path)
    stored = again.history()
    assert stored is not None
    assert stored.chain == (*links[:3], branch)
    assert stored.removed == {b"x" * 32, b"y" * 32}
    again.replace_cluster(_record(1), tuple(map(encode_entry, log.entries)))
    stored = again.history()
    assert stored is not None
    assert [link.decision.number for link in stored.chain] == [1]
    assert not stored.removed
    again.close()


@pytest.mark.skipif(sys.platform == "win32", reason="modes of files are Unix's")
def test_storage_file_is_private_to_owner(tmp_path: Path) -> None:
    MembershipStorage(tmp_path).close()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0


def test_damaged_storage_raises_with_path(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"no database" * 1000)
    path.chmod(0o600)
    with pytest.raises(MembershipError, match="cannot be used"):
        MembershipStorage(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other permissions")
def test_storage_that_other_users_can_read_is_rejected(tmp_path: Path) -> None:
    """It holds the secrets of the cluster."""
    MembershipStorage(tmp_path).close()
    (tmp_path / FILE_NAME).chmod(0o644)
    with pytest.raises(IdentityError, match="holds a secret"):
        MembershipStorage(tmp_path)


def test_storage_of_newer_version_is_not_changed(tmp_path: Path) -> None:
    MembershipStorage(tmp_path).close()
    base = sqlite3.connect(tmp_path / FILE_NAME)
    base.execute("PRAGMA user_version=99")
    base.close()
    with pytest.raises(MembershipError, match="newer"):
        MembershipStorage(tmp_path)


_WRITER = """
import sys
from pathlib import Path
from tests.unit.membership.test_storage import _record
from barnraise.membership.effects import SaveState
from barnraise.membership.storage import MembershipStorage
storage = MembershipStorage(Path(sys.argv[1]))
for number in range(1, 30):
    storage.save(SaveState(_record(number)))
    sys.stdout.write(f"answered {number}\\n")
    sys.stdout.flush()
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to see what was synced")
def test_power_cut_loses_no_answered_state(tmp_path: Path) -> None:
    """Replay the writes of a real process at every answer, without those that no sync followed."""
    state, trail = tmp_path / "state", tmp_path / "trace"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    calls = trace([sys.executable, "-c", _WRITER, str(state)], trail, environment)
    disk, answered, checked = Disk(), 0, 0
    for call in calls:
        disk.do(call)
        if call.name == "write" and call.data.startswith(b"answered "):
            answered = int(call.data.split()[1])
            survivor = tmp_path / f"after-{answered}"
            disk.after_a_power_cut(survivor)
            storage = MembershipStorage(survivor / "state")
            record = storage.record()
            storage.close()
            assert record is not None
            assert record.promised is not None
            assert record.promised.round >= answered
            checked += 1
    assert checked == 29
    lost = Disk(ignore_syncs=True)  # the check can fail: without syncs the writes are gone
    for call in calls:
        lost.do(call)
    lost.after_a_power_cut(tmp_path / "lost")
    storage = MembershipStorage(tmp_path / "lost" / "state")
    assert storage.record() is None
    storage.close()


def test_storage_remembers_forgotten_runs_and_jobs_of_one_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.membership.storage.MOST_FORGOTTEN", 2)
    storage = MembershipStorage(tmp_path)
    for name in ("a", "b", "c", "d"):
        storage.keep_run(name, b"record")
    for name in ("a", "b", "c"):
        storage.forget_run(name, name.encode() * 32)
    for number in (1, 2, 4):
        storage.keep_job(number, b"record")
    storage.keep_run("e", b"record")
    storage.keep_run("d", b"changed")
    storage.forget_jobs([1, 2], [(1, 2)])
    storage.close()
    again = MembershipStorage(tmp_path)
    assert again.runs() == [("e", b"record"), ("d", b"changed")], "the last change is last"
    assert again.forgotten_runs() == [("b", b"b" * 32), ("c", b"c" * 32)]
    assert (again.jobs(), again.forgotten_jobs()) == ([(4, b"record")], [(1, 2)])
    log = TrustLog.found(NodeKey.generate(), "one")
    again.replace_cluster(_record(3), tuple(map(encode_entry, log.entries)))
    assert (again.forgotten_runs(), again.forgotten_jobs()) == ([], [])
    again.close()
