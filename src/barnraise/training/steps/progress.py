"""Progress of one worker in the current step, and in the next one if it overlaps. Pure.

While the all-reduce of a step is in flight, a worker computes micro-batches of the next step. They belong to
the current step once the one in flight is committed, even if the group has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from barnraise.runs.commit import CommitDecision
from barnraise.runs.sharding import MicroBatch
from barnraise.training.sync import Sync

# Returns this worker's share of micro-batches, given those that each rank has completed.
Assign = Callable[[Sequence[MicroBatch], Mapping[int, frozenset[int]]], list[MicroBatch]]


def may_overlap(*, world: int, sync: Sync, coming: Sync | None) -> bool:
    """Tell whether workers may compute during an all-reduce; all workers decide alike.

    Only in rounds of local steps, and if the next round has the same `Sync`.
    """
    return world > 1 and sync.is_local and coming is None


class StepProgress:
    """Micro-batches of the current step: assigned, pending and completed.

    ``pending``: this worker has still to compute them; while it overlaps, they belong to the next step.
    """

    def __init__(self) -> None:
        self.pending: list[MicroBatch] = []
        self.microbatches: tuple[MicroBatch, ...] = ()  # of the current step, of all workers
        self.completed: set[int] = set()  # of these, the ones that this worker has computed
        self.result_digest = b""  # set when this worker holds the result of the step
        self.next_microbatches: tuple[MicroBatch, ...] = ()  # of the next step, while it overlaps
        self.ahead: set[int] = set()  # of these, the ones that this worker has computed
        self.ahead_by_rank: dict[int, frozenset[int]] = {}  # the same for every rank, after a regroup

    @property
    def is_ahead(self) -> bool:
        """Return True while this worker computes the next step."""
        return bool(self.next_microbatches)

    @property
    def samples(self) -> int:
        """Return the samples of the whole step, of all workers."""
        return sum(unit.size for unit in self.microbatches)

    @property
    def own_samples(self) -> int:
        """Return the samples of the step that this worker has computed."""
        return sum(unit.size for unit in self.microbatches if unit.number in self.completed)

    def add_microbatch(self, number: int) -> None:
        """Mark a micro-batch as completed."""
        (self.ahead if self.is_ahead else self.completed).add(number)
        self.pending = [unit for unit in self.pending if unit.number != number]

    def is_due(self, *, has_arrived: bool) -> bool:
        """Tell whether the step can be finished; ``has_arrived``: the result in flight is there."""
        return not self.pending or has_arrived

    def has_portion_left(self, left: int, count: int) -> bool:
        """Tell whether at most ``left`` of ``count`` equal portions of this worker's share are pending.

        The last portion has at least one micro-batch, because the step is finished with the last one.
        Return False if ``left`` is 0 or less: no portion follows, so the step must be finished.
        """
        share = len(self.pending) + len(self.ahead if self.is_ahead else self.completed)
        return left > 0 and len(self.pending) <= max(1, share * left // count)

    def start_step(
        self, units: tuple[MicroBatch, ...], completed: Mapping[int, frozenset[int]], assign: Assign
    ) -> None:
        """Start the current step, of which each rank may have completed micro-batches already."""
        self.microbatches = units
        self.pending = assign(units, completed)

    def start_next_step(self, units: tuple[MicroBatch, ...], assign: Assign) -> None:
        """Start to compute the next step, because the current one is in flight."""
        self.next_microbatches = units
        self.pending = assign(units, self.ahead_by_rank)
        self.ahead_by_rank = {}

    def commit(self, units: Callable[[], tuple[MicroBatch, ...]], assign: Assign) -> None:
        """Make the next step the current one; ``units`` returns its micro-batches."""
        self.result_digest, self.completed, self.ahead = b"", self.ahead, set()
        if self.is_ahead:
            self.microbatches, self.next_microbatches = self.next_microbatches, ()
            return
        ahead_by_rank, self.ahead_by_rank = self.ahead_by_rank, {}
        self.start_step(units(), ahead_by_rank, assign)

    def leave_group(self) -> None:
        """Stop computing the next step. Completed micro-batches are kept."""
        self.next_microbatches = ()

    def resume_from(self, decision: CommitDecision, rank: int) -> None:
        """Keep the micro-batches that the new group has decided to count."""
        self.completed, self.ahead = set(decision.claimed[rank]), set(decision.ahead[rank])
        self.ahead_by_rank = dict(enumerate(decision.ahead))
