"""Entries of the audit log about trust and runs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from barnraise.agent.api.cluster_api import answer
from barnraise.agent.audit_trail import AuditTrail, trust_changes
from barnraise.agent.cluster.join import join
from barnraise.agent.daemon import Agent
from barnraise.agent_client.cluster_requests import (
    JoinClusterRequest,
    PairRequest,
    PskRequest,
    RenameRequest,
    UnpairRequest,
    encode,
)
from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.core.errors import PairingError
from barnraise.core.logs.audit_entry import AuditEntry
from barnraise.core.logs.audit_log import AuditLog, read_audit
from barnraise.identity import NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.runs.control.lifecycle import request_stop
from barnraise.runs.record import RunOutcome, sign_spec
from tests.unit.runs.control.test_lifecycle import KEY, order

_MAC, _NAS, _PC = NodeKey.generate(), NodeKey.generate(), NodeKey.generate()


def _logs() -> tuple[TrustLog, TrustLog, TrustLog]:
    alone = TrustLog.found(_MAC, "mac")
    both = alone.extended(alone.admit(_MAC, _NAS.id, "owner", "nas"))
    guest = both.extended(both.admit(_NAS, _PC.id, "guest", "pc"))
    return alone, guest, guest.extended(guest.revoke(_MAC, _NAS.id))


def _trail(directory: Path) -> AuditTrail:
    return AuditTrail(AuditLog(directory), lambda node: {_MAC.id: "mac", _NAS.id: "nas"}.get(node, "?"))


def _lines(directory: Path) -> list[tuple[str, str, str, str]]:
    return [(entry.event, entry.subject, entry.by, entry.detail) for entry in read_audit(directory)]


def test_admissions_and_removals_name_the_signer() -> None:
    alone, guest, removed = _logs()
    admitted = trust_changes(alone, guest)
    assert [(change.event, change.name, change.role, change.by) for change in admitted] == [
        ("machine-admitted", "nas", "owner", _MAC.id),
        ("machine-admitted", "pc", "guest", _NAS.id),
    ]
    assert [(change.event, change.name, change.by) for change in trust_changes(guest, removed)] == [
        ("machine-removed", "nas", _MAC.id)
    ]
    assert trust_changes(guest, guest) == []


def test_new_key_of_a_machine_is_one_change() -> None:
    _, guest, _ = _logs()
    new = NodeKey.generate()
    changes = trust_changes(guest, guest.extended(guest.rotate(_NAS, new)))
    assert [(change.event, change.node, change.name, change.by) for change in changes] == [
        ("identity-changed", new.id, "nas", _NAS.id)
    ]


def test_admission_that_another_history_lacks_is_a_removal() -> None:
    alone, guest, _ = _logs()
    changes = trust_changes(guest, alone)
    assert [(change.event, change.name, change.by) for change in changes] == [
        ("machine-removed", "nas", None),
        ("machine-removed", "pc", None),
    ]


def test_cluster_that_changes_is_recorded_once(tmp_path: Path) -> None:
    alone, guest, removed = _logs()
    trail = _trail(tmp_path)
    trail.begin(alone, 0)
    for log, branch in ((alone, 0), (guest, 0), (guest, 0), (removed, 1), (removed, 1)):
        trail.cluster_changed(log, branch, "nas is gone")
    events = [(event, subject) for event, subject, _, _ in _lines(tmp_path)]
    assert events == [
        ("machine-admitted", f"nas ({_NAS.id.short})"),
        ("machine-admitted", f"pc ({_PC.id.short})"),
        ("machine-removed", f"nas ({_NAS.id.short})"),
        ("branch-opened", alone.cluster.hex()[:8]),
    ]


def test_order_stop_and_end_of_a_run_are_recorded_with_the_digest(tmp_path: Path) -> None:
    trail = _trail(tmp_path)
    spec = order()
    record = sign_spec(spec, KEY)
    stopping = request_stop(record, "nas", hard=False)
    assert stopping is not None
    outcome = RunOutcome(code=1, sentence="failed:\x1b[2J bad")
    ended = replace(stopping, phase="ended", version=9, outcome=outcome)
    for version in (record, record, stopping, stopping, ended, ended):
        trail.run_changed(spec, version)
    entries = read_audit(tmp_path)
    assert [entry.event for entry in entries] == ["run-started", "run-stopped", "run-ended"]
    assert {entry.digest for entry in entries} == {hashlib.sha256(record.order).hexdigest()}
    assert [entry.detail for entry in entries[1:]] == ["stopped from nas", "failed:?[2J bad"]
    assert entries[0].subject == spec.run
    assert KEY.id.short in entries[0].by


def test_run_of_an_earlier_start_is_not_recorded_again(tmp_path: Path) -> None:
    trail = _trail(tmp_path)
    trail.run_known(order().run, "preparing")
    trail.run_changed(order(), sign_spec(order(), KEY))
    assert read_audit(tmp_path) == []


def _settings(directory: Path) -> Settings:
    # A port of its own for discovery: other tests' agents must not be found.
    network = NetworkSettings(port=0, discovery_port=52998, addresses=("127.0.0.1",))
    return Settings(state=StateSettings(directory=str(directory)), network=network)


def _of(directory: Path, event: str) -> list[AuditEntry]:
    return [entry for entry in read_audit(directory) if entry.event == event]


@pytest.mark.slow
def test_agents_record_what_changes_trust(tmp_path: Path) -> None:
    """Tries a pairing, a wrong code, a pre-shared key, a new name and a removal: each leaves an entry."""

    async def scenario() -> None:
        offerer, joiner = Agent(_settings(tmp_path / "one")), Agent(_settings(tmp_path / "two"))
        await offerer.start()
        await joiner.start()
        try:
            await answer(offerer, encode(PairRequest("owner")), "")
            code = offerer.pairing.offer
            assert code is not None
            at = f"127.0.0.1:{offerer.listener.port}"
            number, *words = str(code.secret).split("-")
            wrong = "-".join([number, *reversed(words)])
            with contextlib.suppress(PairingError):
                await join(joiner, JoinClusterRequest(wrong, at=at))
            await answer(offerer, encode(PairRequest("owner")), "")
            assert offerer.pairing.offer is not None
            await join(joiner, JoinClusterRequest(str(offerer.pairing.offer.secret), at=at))
            await answer(offerer, encode(PskRequest("guest")), "")
            await answer(offerer, encode(RenameRequest("first")), "")
            await answer(offerer, encode(UnpairRequest(joiner.me.short)), "")
        finally:
            await joiner.stop()
            await offerer.stop()

    asyncio.run(scenario())
    offerer, joiner = tmp_path / "one", tmp_path / "two"
    assert [len(_of(offerer, event)) for event in ("code-opened", "code-burned", "psk-made")] == [2, 1, 1]
    assert [entry.by.rpartition(":")[0] for entry in _of(offerer, "code-burned")] == ["127.0.0.1"]
    assert [len(_of(offerer, event)) for event in ("machine-admitted", "machine-removed")] == [1, 1]
    assert "renamed" in _of(offerer, "identity-changed")[0].detail
    assert [entry.detail for entry in _of(joiner, "cluster-joined")] == ["as owner, with a code"]
    assert len(_of(joiner, "agent-started")) == 1
