"""Records of runs for tests of notifications."""

from __future__ import annotations

from typing import Any

from barnraise.agent.notifications.changes import ChangeFacts
from barnraise.runs.record import NodeReport, RunOutcome, RunRecord, WorkerSlot, WorkerState

H0, H1, H2 = (bytes([number]) * 32 for number in range(3))


def record(*nodes: bytes, **changes: Any) -> RunRecord:
    """Return a running session on these machines."""
    slots = tuple(WorkerSlot(node, 0, "cpu", 1) for node in nodes)
    fields: dict[str, Any] = {"phase": "running", "generation": 1, "slots": slots, "elastic": True}
    return RunRecord(**{"order": b"spec", "signature": bytes(64), **fields, **changes})


def ended(code: int, sentence: str, **outcome: Any) -> RunRecord:
    """Return a session on h0 and h1 that has ended."""
    result = RunOutcome(code=code, sentence=sentence, **outcome)
    return record(H0, H1, phase="ended", version=9, outcome=result)


def reports(node: bytes, state: WorkerState) -> dict[bytes, NodeReport]:
    """Return the report of a machine about its only worker."""
    report = NodeReport(run="train-k3f9", incarnation=bytes(16), serial=1, stage="running", workers=(state,))
    return {node: report}


def facts(**changes: Any) -> ChangeFacts:
    """Return the facts of three machines, of which all are present."""
    fields: dict[str, Any] = {
        "run": "train-k3f9",
        "sender": "h0",
        "at": 1000.0,
        "reports": {},
        "present": {H0, H1, H2},
        "leaving": set(),
        "name": lambda node: f"h{node[0]}",
    }
    return ChangeFacts(**{**fields, **changes})
