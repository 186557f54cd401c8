"""A member of a session that fails by itself while others train: it is started again, once. Pure.

A driver that gives up, a file that cannot be read, a state that came damaged are one machine's misfortune. An
error of the script is everybody's: it meets the same place again, or another member that gets the same units,
and then the run ends with it. Before a member has trained, and where nobody else does, it ends at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from barnraise.runs.control.worker_status import WorkerStatus
from barnraise.runs.record import RestartedFailure, RunRecord, WorkerState

_TRACE = "Traceback (most recent call last):"
# It says what a person has to change, and would only be said again.
_NEVER = "RunError"
# Of the script's own collectives, when another is gone: no more its fault than a kill.
_FOLLOWS = ("PeerLost", "OperationAborted")
_MOST_LETTERS = 60


def apply_restart_policy(
    record: RunRecord, seen: Sequence[WorkerStatus], here: Collection[bytes]
) -> tuple[RunRecord, list[WorkerStatus]]:
    """The record with what is forgiven now, and the failures that are not."""
    others = any(one.slot.node in here and not one.has_ended for one in seen)
    known, rest = list(record.forgiven), []
    for one in seen:
        if not one.failed or one.state is None or one.state.signal:
            continue
        kind = failure_kind(one.state)
        is_newcomer = one.slot.start != record.began
        has_trained = one.state.trained or is_newcomer
        if has_trained and kind in _FOLLOWS:
            continue
        place = (one.slot.node, one.slot.local_rank)
        is_new = all((other.node, other.local_rank) != place and other.kind != kind for other in known)
        if has_trained and is_new and others and kind != _NEVER and not record.finished:
            known.append(RestartedFailure(*place, kind))
        else:
            rest.append(one)
    return replace(record, forgiven=tuple(known)), rest


def failure_kind(worker: WorkerState) -> str:
    """The name of the exception that it ended with; its exit code, if it printed none."""
    _, found, trace = worker.tail.rpartition(_TRACE)
    lines = [line for line in trace.splitlines() if line and not line[0].isspace()] if found else []
    name = lines[0].partition(":")[0].rpartition(".")[2].strip() if lines else ""
    return name[:_MOST_LETTERS] or f"code {worker.code}"
