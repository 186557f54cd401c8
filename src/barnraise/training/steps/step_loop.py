"""Step loop of one worker: all-reduce the gradients, vote, commit; regroup when the group fails.

After this worker's last micro-batch of a step, its gradients are all-reduced over the group. When every
worker has voted that it holds the same result, the result is applied: that is a commit. When the group
fails, the workers regroup (see `recovery`).

With local steps (LocalSGD), a worker computes micro-batches of the next round while the all-reduce is in
flight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from barnraise.checkpoint.serialization import digest
from barnraise.core.errors import CollectiveError, RunError
from barnraise.runs.sharding import MicroBatch, coverage_sum
from barnraise.training.group.interface import GroupManager
from barnraise.training.metrics import MetricsLog
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.steps.background_task import BackgroundTask
from barnraise.training.steps.commit import StepContext
from barnraise.training.steps.commit_vote import CommitVote, check_votes, is_newer_group_known
from barnraise.training.steps.progress import may_overlap
from barnraise.training.steps.recovery import StepRecovery
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import Sync

_CLOSE_S = 5.0


class StepLoop(StepRecovery):
    """Drives one worker's steps: all-reduce, commit vote, commit, and recovery when the group fails.

    ``requested_sync``: how rank 0 would synchronize from a later commit on. ``can_unfreeze``: the script may
    unfreeze parameters while it trains.
    """

    can_unfreeze = True

    def __init__(
        self,
        manager: GroupManager,
        checkpoints: CheckpointManager,
        context: StepContext,
        metrics: MetricsLog,
        throughput: Throughput,
    ) -> None:
        super().__init__(manager, checkpoints, context, metrics, throughput)
        self.requested_sync: Sync | None = None
        self._in_flight: BackgroundTask[list[CommitVote]] | None = None

    @property
    def pending(self) -> list[MicroBatch]:
        """Return the micro-batches that this worker has still to compute."""
        return self._progress.pending

    @property
    def is_due(self) -> bool:
        """Return True if `finish_step` has something to do."""
        has_arrived = self._in_flight is not None and self._in_flight.has_ended
        return self._progress.is_due(has_arrived=has_arrived)

    @property
    def position(self) -> tuple[int, int]:
        """Return the step of the pending micro-batches, and the batches before it."""
        if self._in_flight is None:
            return self.done, self._state.covered
        return self.done + 1, self._state.covered + self._batches_in_step()

    @property
    def round_start(self) -> int:
        """Return the batches before the round of the pending micro-batches; a step is a round of one."""
        return self.position[1]

    def has_reached(self, target: int) -> bool:
        """Tell whether this worker has computed its part of the batches before ``target``.

        The last batch of a round counts when the round is committed or in flight.
        """
        start = self.round_start
        if start >= target:
            return True
        count = self._context.data.steps(start, self._state.sync.period)
        return self._progress.has_portion_left(start + count - target, count)

    def exchange_if_due(self) -> bool:
        """Return False: only a group at a hub has something to do between two steps."""
        return False

    @property
    def sends_during_backward(self) -> bool:
        """Return True if gradients may be sent while backward still runs."""
        return not (self._state.sync.is_local or self._state.sync.is_encoded)

    def request_sync(self, sync: Sync) -> None:
        """Set how all workers shall synchronize. May be called from any thread."""
        self.requested_sync = sync

    def start_epoch(self) -> None:
        """Assign micro-batches if there were none, because the stream of the last epoch had ended."""
        if not self._progress.microbatches:
            self._assign({})

    def committed(self) -> contextlib.AbstractContextManager[None]:
        """Hold the committed parameters in the model for the duration of the context."""
        self.check_whole()
        return self._local_sgd.committed()

    def state_digest(self) -> str:
        """Hash everything that a commit may change."""
        with self.committed():
            return digest(self._state.flatten(self.done)).hex()

    def add_microbatch(self, unit: MicroBatch, weight: float, *, is_whole: bool = True) -> None:
        """Accumulate the gradients of a micro-batch.

        If not ``is_whole``, they are one part of it, and the next part follows.
        """
        if self._local_sgd.is_on:
            self._local_sgd.add_microbatch(weight)
        else:
            self._reducer.add_microbatch(weight)
        if not is_whole:
            return
        self._batch_norms.finish_microbatch(unit.number)
        self._progress.add_microbatch(unit.number)
        if self._local_sgd.is_on:
            self._local_sgd.finish_microbatch(unit.size, is_last=not self.pending, clip=self.clip)

    def finish_step(self) -> None:
        """Run the all-reduce, vote and commit; regroup if the group fails.

        If workers may overlap, the all-reduce only starts here. If one is in flight already, wait for it and
        do not start another: the script may look at the result first.
        """
        self.check_can_train()
        if self._in_flight is not None:
            self.wait_in_flight()
            return
        reduce, cast_vote = self._start_reduce()
        if self._may_overlap():

            def reduce_and_vote() -> list[CommitVote]:
                reduce()
                return cast_vote()

            self._in_flight = BackgroundTask(reduce_and_vote)
            self._local_sgd.start_next_round()
            next_microbatches = self._context.data.microbatches(self.position[1], self._state.sync.period)
            self._progress.start_next_step(next_microbatches, self._assign_own)
            return
        try:
            with self._throughput.phases.measure("communication"):
                reduce()
            with self._throughput.phases.measure("vote"):
                votes = cast_vote()
        except CollectiveError as error:
            self.join_next_group(error)
            return
        self._commit(votes)

    def wait_in_flight(self) -> None:
        """Wait for the all-reduce in flight, if any, and commit its result."""
        if self._in_flight is None:
            return
        try:
            with self._throughput.phases.measure("communication"):
                votes = self._in_flight.result()
        except CollectiveError as error:
            self._in_flight = None
            self._local_sgd.rollback_round(self.clip)
            self.join_next_group(error)
            return
        self._in_flight = None
        self._local_sgd.on_round_committed()
        self._commit(votes)

    def close(self) -> None:
        """Abort the all-reduce in flight when the script ends.

        A thread with torch's C++ on its stack would abort the interpreter at exit.
        """
        if self._in_flight is not None and not self._in_flight.has_ended:
            self._manager.group.abort()
            self._in_flight.wait(_CLOSE_S)

    def _may_overlap(self) -> bool:
        """Tell whether to compute while the all-reduce is in flight; all workers decide alike."""
        sync, coming = self._state.sync, self._state.coming
        if not self._group_overlaps or not may_overlap(world=self._manager.world, sync=sync, coming=coming):
            return False
        return self._context.data.may_overlap(self._state.covered + self._batches_in_step())

    def _start_reduce(self) -> tuple[Callable[[], None], Callable[[], list[CommitVote]]]:
        """Return a function that all-reduces the step, and one that then votes and returns all votes.

        Both may run on any thread.
        """
        self._check_unfrozen()
        self._local_sgd.submit_change(self.clip)
        self._norm_table = self._batch_norms.to_table(len(self._progress.microbatches))
        group, sync = self._manager.group, self._state.sync
        next_sync = None
        if self._manager.rank == 0 and self.requested_sync is not None and self._throughput.is_known:
            next_sync = self.requested_sync.with_inner_batch(self._context.data.batch, self._manager.world)
        reduce_compressed = None
        if sync.is_encoded:
            scale = 1.0 if self._local_sgd.is_on else self._context.scaler.factor()
            reduce_compressed = partial(
                self._compression.all_reduce,
                group,
                sync,
                self.done,
                parts=self._reducer.feedback_parts(),
                divisor=self._progress.samples * scale,
            )
        vote = self._make_vote()

        def reduce() -> None:
            self._reducer.all_reduce(group, self._norm_table, reduce_compressed, next_sync)

        def cast_vote() -> list[CommitVote]:
            return self._exchange_votes(vote, self._reducer.digest(self.done))

        return reduce, cast_vote

    def _check_unfrozen(self) -> None:
        """Raise RunError if the script has unfrozen a parameter that cannot be trained from now on."""
        unfrozen = self._reducer.unfrozen_here()
        if not unfrozen:
            return
        names = {id(held): name for name, held in self._state.base.held_names().items()}
        for parameter in unfrozen:
            if id(parameter) not in names:
                raise RunError(
                    f"an unfrozen parameter of shape {tuple(parameter.shape)} is not in the model's state: "
                    "it would be neither saved nor sent to others",
                    hint="Put everything that is trained into the module that you give to prepare.",
                )
            if self._local_sgd.is_on or not self.can_unfreeze:
                raise RunError(
                    f"{names[id(parameter)]} was unfrozen after prepare, which works neither with rounds of "
                    "local steps nor with a hub",
                    hint="Unfreeze it before you call prepare, or synchronize every step.",
                )

    def _make_vote(self) -> CommitVote:
        """Build this worker's vote on the current step, still without the digest of the result."""
        window = self._state_window if self._local_sgd.is_on else self._state.window_digest(self.done)
        return CommitVote(
            self.done,
            b"",
            0,
            self._throughput.speed(),
            dict(self._metrics.of_step(self.done - 1)),
            self._checkpoints.is_due(),
            window,
            self._progress.samples,
            self._checkpoints.can_save,
            microbatches=coverage_sum(self._progress.completed),
            state_set=self._state.base.state_digest(),
            changed=self._state.base.named_changes(),
        )

    def _exchange_votes(self, vote: CommitVote, result_digest: bytes) -> list[CommitVote]:
        """Vote that this worker holds the result, and return every worker's vote."""
        self._progress.result_digest = result_digest
        count = len(self._progress.microbatches)
        manager = self._manager
        self._trace.note_group(manager, count, result_digest if self._bitwise_sync.mixed else b"")
        own = msgspec.structs.replace(
            vote,
            digest=result_digest,
            newest_generation=manager.newest_generation(),
            recovery_attempt=manager.recovery_attempt(),
        )
        messages = manager.group.all_gather_bytes(msgspec.msgpack.encode(own))
        return check_votes(
            messages,
            step=self.done,
            microbatches=count,
            mixed=self._bitwise_sync.mixed,
            name_of=manager.name_of,
        )

    def _commit(self, votes: Sequence[CommitVote]) -> None:
        self._apply_commit(votes)
        try:
            self._after_commit(votes)
        except CollectiveError as error:
            self.join_next_group(error)
            return
        if is_newer_group_known(votes, self._manager.generation):
            self.join_next_group()
            return
        self._local_sgd.resume_next_round()
