"""Commits: what is applied when all workers hold the same result of a step.

Members of the group and joining workers that replay committed steps run the same code.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from barnraise.checkpoint.serialization import FlatState
from barnraise.core.errors import ProtocolError, StepFailed
from barnraise.history.entries import StateOrigin
from barnraise.runs.sharding import MicroBatch
from barnraise.training.data.iterable import IterableLoader
from barnraise.training.debug_trace import CommitTrace
from barnraise.training.gradients.batch_norm_stats import BatchNormStats
from barnraise.training.gradients.compressed_reducer import CompressedReducer
from barnraise.training.gradients.grad_scaler import ScalerAdapter
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.group.interface import GroupManager
from barnraise.training.local_sgd import LocalSgd
from barnraise.training.metrics import MetricsLog
from barnraise.training.recovery.live_recovery import CommittedStep, RecoveryCoordinator
from barnraise.training.state.bitwise_sync import ADOPT_EVERY, BitwiseSync
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.state.training_state import TrainingState
from barnraise.training.steps.commit_vote import CommitVote
from barnraise.training.steps.load_balancing import assign_own
from barnraise.training.steps.progress import StepProgress
from barnraise.training.steps.throughput import Throughput

log = logging.getLogger("barnraise.training")


class StepData(Protocol):
    """The training data by step; ``step`` counts batches from the start of the run."""

    @property
    def batch(self) -> int:
        """Return the samples of a batch over all workers; the last one of an epoch may have fewer."""

    def microbatches(self, step: int, period: int = 1) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of the round of ``period`` steps that starts there."""

    def steps(self, step: int, period: int) -> int:
        """Return how many steps such a round has; fewer than ``period`` at the end of an epoch."""

    def may_overlap(self, step: int) -> bool:
        """Tell whether micro-batches there may be computed before earlier ones are committed."""

    def catch_up(self, step: int) -> None:
        """Prepare to start at this step."""


class StepContext(NamedTuple):
    """The objects of one worker that a commit changes."""

    data: StepData
    reducer: GradientReducer
    local_sgd: LocalSgd
    batch_norms: BatchNormStats
    state: TrainingState
    scaler: ScalerAdapter
    bitwise_sync: BitwiseSync
    optimizer_steps: list[Callable[..., Any]]
    scheduler_steps: list[Callable[..., Any]]


class FailedCommit(NamedTuple):
    """Commit that raised an error on this worker; the other workers have applied the step.

    ``is_partial``: a part of the model or of an optimizer is changed, and the rest is not.
    """

    step: int
    reason: str
    is_partial: bool

    def error(self) -> StepFailed:
        """Return the error of a script that trains on."""
        what = "was applied only in part" if self.is_partial else "has a callback that failed"
        return StepFailed(f"step {self.step} {what} on this machine: {self.reason}")


class StepCommitter:
    """Applies the result of a step to one worker's model, optimizers, schedulers and metrics.

    ``done``: committed steps. ``clip``: maximum norm of the gradient. ``committed_samples``: of the newest
    step, of all workers. ``state_origin``: where the state of the current group came from.
    """

    def __init__(
        self,
        manager: GroupManager,
        checkpoints: CheckpointManager,
        context: StepContext,
        metrics: MetricsLog,
        throughput: Throughput,
    ) -> None:
        self.done = 0
        self.clip: float | None = None
        self.committed_samples = self.computed_samples = 0  # the latter: those of this worker
        self.state_origin: StateOrigin = "kept"
        self.on_commit: list[Callable[[], None]] = []
        self.on_checkpoint: list[Callable[[], None]] = []  # called before the state is saved
        self.on_handover: list[Callable[[], None]] = []  # called before new workers train with the state
        self.commit_range: tuple[int, int] | None = None  # batches before and after, during ``on_commit``
        self._manager, self._checkpoints, self._context = manager, checkpoints, context
        self._reducer, self._batch_norms, self._state = context.reducer, context.batch_norms, context.state
        self._local_sgd, self._bitwise_sync = context.local_sgd, context.bitwise_sync
        self._compression = CompressedReducer()
        self._metrics, self._throughput = metrics, throughput
        self._progress = StepProgress()
        self._recovery = RecoveryCoordinator(manager)
        self._trace = CommitTrace()
        self._norm_table = torch.zeros(0)  # batch norm statistics of the step, summed over workers
        self._state_window = b""  # hash of a part of the committed model
        self._failed_commit: FailedCommit | None = None

    def check_can_train(self) -> None:
        """Raise StepFailed if a commit has failed here: the state may differ from that of other workers."""
        if self._failed_commit is not None:
            raise self._failed_commit.error()

    def check_whole(self) -> None:
        """Raise StepFailed if the model holds a step that was applied only in part."""
        if self._failed_commit is not None and self._failed_commit.is_partial:
            raise self._failed_commit.error()

    @property
    def overlaps(self) -> bool:
        """Return True if this worker may compute while a round's all-reduce is in flight.

        Batch norm statistics are summed with the step, and a stream cannot be read ahead.
        """
        return not (
            self._batch_norms.width
            or isinstance(self._context.data, IterableLoader)
            or self._reducer.is_on_mps
        )

    # commit

    def _apply_commit(self, votes: Sequence[CommitVote]) -> None:
        """Apply the result of the step: from here on it counts. ``votes`` is empty after a regroup."""
        batches, covered = self._batches_in_step(), self._state.covered
        self._recovery.note_commit(lambda: self._committed_step(batches))
        with self._failing_at(self.done + 1, is_partial=True):
            self._compression.commit()
            self._apply_update(self.clip, batches)
            completed, self.committed_samples = self._progress.completed, self._progress.samples
            self.computed_samples = self._progress.own_samples
            if votes:
                self._throughput.update([vote.speed for vote in votes], self._manager.rank)
                self._metrics.update([vote.logged for vote in votes], self.done)
            self._start_next_step()
        self.commit_range = (covered, self._state.covered)
        with self._failing_at(self.done, is_partial=False):
            for callback in self.on_commit:
                callback()
        self._trace.write(self._state, self.done, completed)

    @contextlib.contextmanager
    def _failing_at(self, step: int, *, is_partial: bool) -> Iterator[None]:
        """Note an error of this step, also Ctrl-C: a script that catches it must not repeat the step."""
        try:
            yield
        except BaseException as error:
            reason = "".join(traceback.format_exception_only(error)).strip()
            self._failed_commit = FailedCommit(step, reason, is_partial)
            raise
        finally:
            self.commit_range = None

    def _committed_step(self, batches: int) -> CommittedStep:
        """Return the result as joining workers replay it."""
        tensors = [*self._reducer.copy_result(), self._norm_table.clone()]
        return CommittedStep(self.done + 1, self._state.epoch, self.clip, tensors, batches)

    def _apply_update(self, clip: float | None, batches: int) -> None:
        """Turn the sum over all workers into an optimizer step."""
        self._batch_norms.commit(self._norm_table)
        next_sync = self._reducer.received_sync()
        if self._local_sgd.is_on:
            self._local_sgd.apply()
        else:
            scaler = self._context.scaler
            finite = scaler.scaler is None or self._reducer.is_finite()
            has_gradient = self._reducer.write_grads(clip, scaler.factor())
            if finite and has_gradient:
                self._step_optimizers()
            scaler.update(finite=finite)
        self._advance_schedulers(batches)
        self._reducer.clear_grads()
        self.done += 1
        if unfrozen := self._reducer.unfrozen_anywhere():
            self._state.base.unfreeze(unfrozen)
            self._compression.reset_codec()
        was_local = self._local_sgd.is_on
        adopted = self._state.update_sync(next_sync, is_alone=self._manager.world == 1)
        if adopted is not None:
            log.warning("from step %d on: %s", self._state.covered, adopted.describe())
        if self._local_sgd.is_on != was_local or (adopted is not None and not adopted.is_encoded):
            self._compression.load_residuals({})  # errors of gradients do not apply to a round's change

    def _step_optimizers(self) -> None:
        for step in self._context.optimizer_steps:
            step()

    def _advance_schedulers(self, batches: int) -> None:
        for _ in range(batches):
            for step in self._context.scheduler_steps:
                step()
        self._state.covered += batches

    def _after_commit(self, votes: Sequence[CommitVote]) -> None:
        """Save checkpoints and start recoveries. All workers decide alike, from the same votes."""
        has_changed = self._recovery.set_known({vote.recovery_attempt for vote in votes})
        checkpoint_due = votes[0].checkpoint_due
        group = self._manager.group
        if self._bitwise_sync.mixed and (checkpoint_due or has_changed or self.done % ADOPT_EVERY == 0):
            self._bitwise_sync.adopt(group, self.done)
        if checkpoint_due:
            for callback in self.on_checkpoint:
                callback()
            savers = [rank for rank, vote in enumerate(votes) if vote.can_save]
            if self._state.sync.is_encoded:
                parts = self._reducer.feedback_parts()
                self._state.residuals = self._compression.sum_residuals(group, parts)
            with self._throughput.phases.measure("checkpoint"):
                self._checkpoints.save(self._manager, savers, self._state, self.done)
            self._state.residuals = {}
        self._recovery.start(lambda: self._state.flatten(self.done), self.done)

    def _start_next_step(self) -> None:
        """Move on to the next step, of which this worker may have computed a part."""
        self._local_sgd.finish_round()
        self._reducer.clear()
        self._update_state_window()
        self._progress.commit(self._step_microbatches, self._assign_own)

    def _update_state_window(self) -> None:
        """Hash a part of the committed model while the model holds it."""
        self._state_window = self._state.window_digest(self.done) if self._local_sgd.is_on else b""

    # micro-batches

    def _batches_in_step(self) -> int:
        return self._context.data.steps(self._state.covered, self._state.sync.period)

    def _step_microbatches(self) -> tuple[MicroBatch, ...]:
        return self._context.data.microbatches(self._state.covered, self._state.sync.period)

    def _assign(self, completed: Mapping[int, frozenset[int]]) -> None:
        """Assign the step's micro-batches; ``completed``: those that each rank has computed."""
        self._progress.start_step(self._step_microbatches(), completed, self._assign_own)

    def _assign_own(
        self, microbatches: Sequence[MicroBatch], completed: Mapping[int, frozenset[int]]
    ) -> list[MicroBatch]:
        """Return this worker's share of the micro-batches."""
        return assign_own(microbatches, completed, self._throughput, self._manager)

    # joining workers

    def _load_state(self, parts: FlatState) -> int:
        """Load another worker's state. Return its number of committed steps."""
        self.done = self._state.load(parts)
        self._context.data.catch_up(self._state.covered)
        return self.done

    def _replay(self, step: CommittedStep) -> None:
        """Apply a step that the other workers have committed."""
        *totals, table = step.tensors
        self._reducer.load_result(totals)
        if step.epoch != self._state.epoch:
            self._state.epoch, self._state.epoch_start = step.epoch, self._state.covered
        width = self._batch_norms.width
        rows = table.view(torch.float64)
        if rows.numel() % max(width, 1) or (rows.numel() and not width):
            raise ProtocolError("the result of a step does not fit this model")
        self._norm_table = rows.reshape(rows.numel() // max(width, 1), width)
        self._apply_update(step.clip, step.batches)
        self._context.data.catch_up(self._state.covered)
