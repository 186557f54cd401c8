"""Entries of the audit log about trust and runs: what a change of the cluster means, in words for people."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from typing import NamedTuple

from barnraise.core.logs.audit_entry import AuditEvent
from barnraise.core.logs.audit_log import AuditLog
from barnraise.core.units import counted
from barnraise.identity import NodeId
from barnraise.identity.trust import AdmitMember, RevokeMember, TrustLog
from barnraise.runs.record import RunRecord, RunSpec


class TrustChange(NamedTuple):
    """Machine that entered or left the cluster; ``by``: the owner that signed it, None if none did."""

    event: AuditEvent
    node: NodeId
    name: str
    role: str
    by: NodeId | None


def trust_changes(before: TrustLog, after: TrustLog) -> list[TrustChange]:
    """Return the machines that a new trust log admits or removes. Pure."""
    changes = []
    members, revoked = after.members, after.revoked
    renewed = {after.current(node): node for node in before.members if node not in members}
    for node, member in members.items():
        if node in renewed:
            changes.append(TrustChange("identity-changed", node, member.name, member.role, renewed[node]))
        elif node not in before.members:
            by = _signer(after, AdmitMember, node)
            changes.append(TrustChange("machine-admitted", node, member.name, member.role, by))
    for node, member in before.members.items():
        if node not in members and after.current(node) not in members:
            by = _signer(after, RevokeMember, node) if node in revoked else None
            changes.append(TrustChange("machine-removed", node, member.name, member.role, by))
    return changes


def _signer(log: TrustLog, kind: type[AdmitMember] | type[RevokeMember], node: NodeId) -> NodeId | None:
    return next(
        (entry.by for entry in log.entries if isinstance(entry.body, kind) and entry.body.subject == node),
        None,
    )


class AuditTrail:
    """Writer of the agent's entries. It compares each new state with the last one that it saw."""

    def __init__(self, audit: AuditLog, name_of: Callable[[NodeId], str]) -> None:
        self._audit = audit
        self._name_of = name_of
        self._log: TrustLog | None = None
        self._branch = 0
        self._phases: dict[str, str] = {}

    def begin(self, log: TrustLog, branch: int) -> None:
        """Take a state as known: the one on disk, or the one of a cluster that was just joined."""
        self._log, self._branch = log, branch

    def cluster_changed(self, log: TrustLog, branch: int, why: str) -> None:
        """Record admissions, removals, and that a person let a part of the cluster continue."""
        before = self._log
        if before is not None and before != log:
            for change in trust_changes(before, log):
                self._audit.write(
                    change.event,
                    subject=f"{change.name} ({change.node.short})",
                    by=self._shown(change.by) if change.by is not None else "",
                    detail=f"as {change.role}",
                )
        if branch > self._branch:
            self._audit.write("branch-opened", subject=log.cluster.hex()[:8], detail=why)
        self.begin(log, branch)

    def run_known(self, run: str, phase: str) -> None:
        """Take a run as known: it was recorded before this start."""
        self._phases[run] = phase

    def run_changed(self, spec: RunSpec, record: RunRecord) -> None:
        """Record a new order with its digest, and the stop and end of a run."""
        before = self._phases.get(spec.run)
        self._phases[spec.run] = record.phase
        by = self._shown(NodeId(spec.by))
        if before is None:
            machines = counted(len(spec.nodes), "machine")
            self._audit.write(
                "run-started",
                subject=spec.run,
                by=by,
                detail=f"{shlex.join(spec.program.command)}, on {machines}",
                digest=order_digest(record),
            )
        if record.phase == "stopping" and before != "stopping":
            self._audit.write("run-stopped", subject=spec.run, detail=record.why, digest=order_digest(record))
        if record.phase == "ended" and before != "ended":
            outcome = record.outcome.sentence if record.outcome is not None else record.why
            self._audit.write("run-ended", subject=spec.run, detail=outcome, digest=order_digest(record))

    def _shown(self, node: NodeId) -> str:
        return f"{self._name_of(node)} ({node.short})"


def order_digest(record: RunRecord) -> str:
    """Return the SHA-256 of the signed spec of a run. Pure."""
    return hashlib.sha256(record.order).hexdigest()
