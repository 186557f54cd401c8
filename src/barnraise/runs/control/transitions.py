"""Inputs of a reconcile, and the transitions that end a generation or a run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from barnraise.core.units import counted
from barnraise.runs.control.eviction import Pair
from barnraise.runs.control.worker_status import FAILED, WorkerStatus, failure_outcome
from barnraise.runs.record import NodeReport, RunOutcome, RunRecord, RunSpec

SETTLED_S = 600.0  # a generation that ran this long gets all its restarts back


class ReconcileInput(NamedTuple):
    """All inputs of one decision. ``since_s``: seconds since the controller has seen this version."""

    spec: RunSpec
    reports: Mapping[bytes, NodeReport]
    present: Sequence[bytes]
    since_s: float
    name: Callable[[bytes], str]
    stuck_s: float = 0.0  # how long a member has waited for another group than this version's
    unreachable_s: Mapping[Pair, float] = {}  # how long two machines have missed each other's heartbeats
    controller: bytes = b""  # the machine that decides
    notifier: bytes = (
        b""  # the machine that sends the notices of an attempt; empty: the one that added its job
    )


def succeed(record: RunRecord, sentence: str) -> RunRecord:
    """Return the record of a run that has ended successfully."""
    return replace(record, phase="ended", why=sentence, outcome=RunOutcome(code=0, sentence=sentence))


def restart_or_fail(
    record: RunRecord, facts: ReconcileInput, lost: Sequence[bytes], failed: WorkerStatus | None
) -> RunRecord:
    """Restart after the loss of a machine or worker, or fail if no restart is left."""
    spec = facts.spec
    if failed is not None:
        outcome = failure_outcome(failed, facts.name)
        why = outcome.sentence
    else:
        why = f"{machine_names(lost, facts)} went away"
        outcome = RunOutcome(code=FAILED, sentence=why)
    used = 0 if facts.since_s > SETTLED_S else record.restarts
    if used >= spec.options.restarts:
        often = f" after {counted(used, 'restart')}" if used else ""
        return fail(record, replace(outcome, sentence=f"{why}{often}; no restart is left"))
    if len([node for node in spec.nodes if node in facts.present]) < spec.options.min_nodes:
        needed = "machine is" if spec.options.min_nodes == 1 else "machines are"
        why = f"{why}; at least {spec.options.min_nodes} {needed} needed"
    return replace(record, phase="restarting", restarts=used + 1, finished=False, why=why)


def fail(record: RunRecord, outcome: RunOutcome) -> RunRecord:
    """Return the record of a run that stops because of this outcome."""
    return replace(record, phase="stopping", why=outcome.sentence, outcome=outcome)


def machine_names(nodes: Sequence[bytes], facts: ReconcileInput) -> str:
    """Return the names of machines, separated by commas."""
    return ", ".join(facts.name(node) for node in nodes)
