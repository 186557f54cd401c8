"""Workers of a run with the states that their machines report, and the root cause of failures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.runs.control.failures import FOLLOWERS
from barnraise.runs.record import NodeReport, RunOutcome, RunRecord, WorkerSlot, WorkerState

FAILED = 1
KILLED = 128  # plus the number of the signal, as in shells


class WorkerStatus(NamedTuple):
    """Worker slot and the state that its own machine reported."""

    rank: int
    slot: WorkerSlot
    state: WorkerState | None

    @property
    def has_exited(self) -> bool:
        return self.state is not None and self.state.state == "ended"

    @property
    def leave_reason(self) -> str:
        """Return why the others continue without this living worker; an empty text if they do not."""
        state = self.state.state if self.state is not None else ""
        return {"stopped": "has a stopped worker", "leaving": "leaves"}.get(state, "")

    @property
    def failed(self) -> bool:
        return self.state is not None and self.state.failed

    @property
    def succeeded(self) -> bool:
        return self.has_exited and not self.failed


def worker_statuses(record: RunRecord, reports: Mapping[bytes, NodeReport]) -> list[WorkerStatus]:
    """Return the status of each worker, by rank."""
    states = reported_states(reports)
    return [WorkerStatus(rank, slot, states.get(slot.key)) for rank, slot in enumerate(record.slots)]


def reported_states(reports: Mapping[bytes, NodeReport]) -> dict[tuple[bytes, int, int], WorkerState]:
    """Return the reported state of each worker, by the key of its slot."""
    return {
        (node, worker.local_rank, worker.start): worker
        for node, report in reports.items()
        for worker in report.workers
    }


def training_progress(record: RunRecord, reports: Mapping[bytes, NodeReport]) -> TrainingProgress | None:
    """Return the progress that the main worker reports; before its first report, the highest known one."""
    states = reported_states(reports)
    main = states.get(record.slots[0].key) if record.slots else None
    if main is not None and main.progress is not None:
        return main.progress
    known = [state.progress for state in states.values() if state.progress is not None]
    return max(known, key=lambda progress: progress.step, default=None)


def root_cause(failed: Sequence[WorkerStatus]) -> WorkerStatus | None:
    """Return the failure that the others follow from; not one that reports the loss of another rank."""

    def order(worker: WorkerStatus) -> tuple[bool, int, int]:
        assert worker.state is not None
        follows = any(text in worker.state.tail for text in FOLLOWERS)
        return follows, worker.state.place, worker.rank

    return min(failed, key=order, default=None)


def failure_outcome(failed: WorkerStatus, name: Callable[[bytes], str]) -> RunOutcome:
    """Return the outcome of a run that ends with this failure."""
    worker = failed.state
    assert worker is not None
    worker_name = f"rank {failed.rank} on {name(failed.slot.node)}"
    if worker.signal:
        code = min(255, KILLED + worker.signal)
        sentence = f"{worker_name} was killed by signal {worker.signal}"
        if "out-of-memory" in worker.tail or "out of memory" in worker.tail:
            sentence = f"{worker_name} ran out of memory and was killed by its system"
    else:
        code = worker.code if 0 < worker.code <= 255 else FAILED
        sentence = f"{worker_name} exited with code {worker.code}"
    return RunOutcome(code=code, sentence=sentence, node=failed.slot.node, rank=failed.rank, tail=worker.tail)
