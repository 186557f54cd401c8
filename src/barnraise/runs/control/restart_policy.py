"""Restart policy of sessions: a worker that fails alone is restarted once. Pure.

A driver fault, an unreadable file or a damaged state are local to one machine. An error of the script is
not: it happens again, or on another worker that gets the same micro-batches, and then the run fails. A
failure before the worker has trained, or without other workers, fails the run at once. A worker that the
others refuse is not restarted: they train on without it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from barnraise.runs.control.failures import exception_line, refusal
from barnraise.runs.control.worker_status import WorkerStatus
from barnraise.runs.record import RestartedFailure, RunRecord, WorkerState

# These ask for a change by a person, so a restart would fail in the same way.
_NEVER = ("RunError", "CheckpointError")
# Collectives of the script raise these when another worker is lost.
_FOLLOWS = ("PeerLost", "OperationAborted")
_MAX_NAME_LENGTH = 60


def apply_restart_policy(
    record: RunRecord, workers: Sequence[WorkerStatus], here: Collection[bytes]
) -> tuple[RunRecord, list[WorkerStatus]]:
    """Return the record with the failures that are restarted, and the failures that are not."""
    others = any(worker.slot.node in here and not worker.has_exited for worker in workers)
    known, final = list(record.restarted_failures), []
    for worker in workers:
        if not worker.failed or worker.state is None or worker.state.signal:
            continue
        kind = failure_kind(worker.state)
        has_joined_later = worker.slot.start != record.first_generation
        has_trained = worker.state.trained or has_joined_later
        if has_trained and (kind in _FOLLOWS or refusal(worker.state.tail)):
            continue
        place = (worker.slot.node, worker.slot.local_rank)
        is_new = all((other.node, other.local_rank) != place and other.kind != kind for other in known)
        if has_trained and is_new and others and kind not in _NEVER and not record.finished:
            known.append(RestartedFailure(*place, kind))
        else:
            final.append(worker)
    return replace(record, restarted_failures=tuple(known)), final


def failure_kind(worker: WorkerState) -> str:
    """Return the name of the exception that a worker exited with; its exit code if it printed none."""
    name = exception_line(worker.tail).partition(":")[0].rpartition(".")[2].strip()
    return name[:_MAX_NAME_LENGTH] or f"code {worker.code}"
