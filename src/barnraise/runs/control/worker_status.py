"""A run's workers, each as its own machine tells of it, and which failure the others follow from. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from barnraise.runs.record import NodeReport, RunOutcome, RunRecord, WorkerSlot, WorkerState

FAILED = 1
KILLED = 128  # and the number of the signal, as shells count
_FOLLOWERS = ("PeerLost", "peer-lost", "rank is lost", "DistBackendError", "Connection closed by peer")


class WorkerStatus(NamedTuple):
    """A worker of the record, as its own machine tells of it. Nobody can speak of another's."""

    rank: int
    slot: WorkerSlot
    state: WorkerState | None

    @property
    def has_ended(self) -> bool:
        return self.state is not None and self.state.state == "ended"

    @property
    def is_going(self) -> str:
        """Why the others go on without it though it is alive; empty: they do not."""
        word = self.state.state if self.state is not None else ""
        return {"stopped": "has a stopped worker", "leaving": "leaves"}.get(word, "")

    @property
    def failed(self) -> bool:
        return self.state is not None and self.state.failed

    @property
    def ended_well(self) -> bool:
        return self.has_ended and not self.failed


def worker_statuses(record: RunRecord, reports: Mapping[bytes, NodeReport]) -> list[WorkerStatus]:
    """By rank."""
    states = reported_states(reports)
    return [WorkerStatus(rank, slot, states.get(slot.key)) for rank, slot in enumerate(record.slots)]


def reported_states(reports: Mapping[bytes, NodeReport]) -> dict[tuple[bytes, int, int], WorkerState]:
    """By the key of a slot."""
    return {
        (node, worker.local_rank, worker.start): worker
        for node, report in reports.items()
        for worker in report.workers
    }


def root_cause(failed: Sequence[WorkerStatus]) -> WorkerStatus | None:
    """The failure that the others follow from: not one that only complains that another was lost."""

    def order(one: WorkerStatus) -> tuple[bool, int, int]:
        assert one.state is not None
        follows = any(word in one.state.tail for word in _FOLLOWERS)
        return follows, one.state.place, one.rank

    return min(failed, key=order, default=None)


def failure_outcome(failed: WorkerStatus, name: Callable[[bytes], str]) -> RunOutcome:
    """Of a run that ends with this."""
    worker = failed.state
    assert worker is not None
    who = f"rank {failed.rank} on {name(failed.slot.node)}"
    if worker.signal:
        code = min(255, KILLED + worker.signal)
        sentence = f"{who} was ended by signal {worker.signal}"
        if "out-of-memory" in worker.tail or "out of memory" in worker.tail:
            sentence = f"{who} ran out of memory and was ended by its system"
    else:
        code = worker.code if 0 < worker.code <= 255 else FAILED
        sentence = f"{who} ended with code {worker.code}"
    return RunOutcome(code=code, sentence=sentence, node=failed.slot.node, rank=failed.rank, tail=worker.tail)
