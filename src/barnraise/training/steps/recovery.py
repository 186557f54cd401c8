"""Recovery of a broken step: regroup, decide whether the step counts, then transfer the state.

The surviving workers join the next group. From what each of them holds, all decide alike whether the step
is committed (``runs.commit``). Workers without the state then receive it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from barnraise.core import metrics
from barnraise.core.decoding import decode
from barnraise.core.errors import CollectiveError
from barnraise.core.metrics import catalogue
from barnraise.runs.commit import NO_MAP, CommitDecision, MapKey, MemberState, decide_commit
from barnraise.training.group.interface import GroupManager
from barnraise.training.metrics import MetricsLog
from barnraise.training.recovery.blocking_recovery import BlockingRecovery
from barnraise.training.recovery.failures import exit_without_state, raise_if_permanent
from barnraise.training.recovery.live_recovery import JoiningWorker, RecoveryStats, recover_live
from barnraise.training.recovery.state_transfer import (
    MAX_SKELETON,
    ranks_with_same_state,
    receive_bytes,
    send_bytes,
)
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.steps.commit import StepCommitter, StepContext
from barnraise.training.steps.commit_vote import UNREADABLE
from barnraise.training.steps.throughput import Throughput

log = logging.getLogger("barnraise.training")


class StepRecovery(StepCommitter):
    """Recovers one worker when its group fails or changes.

    ``assignment_epoch`` counts how often micro-batches were assigned again because the group had changed.
    """

    def __init__(
        self,
        manager: GroupManager,
        checkpoints: CheckpointManager,
        context: StepContext,
        metrics: MetricsLog,
        throughput: Throughput,
    ) -> None:
        super().__init__(manager, checkpoints, context, metrics, throughput)
        self.assignment_epoch = 0
        self.map_key: MapKey = NO_MAP  # the map that this worker is in
        self.joined_late = False  # this worker got the state from others
        # Called in each new group with the map that members are in; may raise CollectiveError.
        self.on_group: Callable[[MapKey], None] = lambda key: None
        self._needs_state = True
        self._group_overlaps = False  # all workers of the group can overlap
        self._joining_worker = JoiningWorker()
        self._blocking_recovery = BlockingRecovery(manager, context.state)

    @property
    def recovery_stats(self) -> RecoveryStats | None:
        """Return how this worker received the state, if it joined while the others trained."""
        return self._joining_worker.stats

    def join_next_group(self, error: CollectiveError | None = None) -> None:
        """Join groups until one holds in which all workers agree on the step and have the state.

        ``error``: why the last group failed. Raise RunError if no other group would do better.
        """
        self.check_can_train()
        raise_if_permanent(error)
        start = time.monotonic()
        if error is not None:
            log.info("the group failed at step %d: %s", self.done, error.message)
        self.assignment_epoch += 1
        self._progress.leave_group()
        self._batch_norms.finish_microbatch(None)
        self._reducer.discard_microbatch()
        self._local_sgd.swap_to_committed()
        while True:
            if self._needs_state:
                max_bytes = self._state.max_bytes
                recover_live(self._manager, self._joining_worker, max_bytes, self._load_state, self._replay)
            self._manager.join_next_group(error)
            try:
                decision = self._decide_step()
                self._recover(decision)
                self.on_group(decision.map_key)
            except CollectiveError as failure:
                raise_if_permanent(failure)
                generation = self._manager.generation
                log.info("generation %d failed during setup: %s", generation, failure.message)
                error = failure
                continue
            metrics.counter(catalogue.REGROUPS).inc()
            metrics.histogram(catalogue.RECOVERY_TIME).observe(time.monotonic() - start)
            return

    def _decide_step(self) -> CommitDecision:
        """Exchange what each worker holds. Commit the current step, or discard its result."""
        progress = self._progress
        own = MemberState(
            self._needs_state,
            self.done,
            progress.result_digest,
            tuple(sorted(progress.completed)),
            recovered_live=self._joining_worker.done >= 0,
            speed=self._throughput.speed(),
            arithmetic=self._bitwise_sync.arithmetic,
            ahead=tuple(sorted(progress.ahead)),
            epoch=(self._state.epoch, self._state.epoch_start),
            overlaps=self.overlaps,
            map_key=self.map_key,
        )
        messages = self._manager.group.all_gather_bytes(msgspec.msgpack.encode(own))
        decision = decide_commit([decode(_member_states, message, UNREADABLE) for message in messages])
        log.info("generation %d of %d: %s", self._manager.generation, self._manager.world, decision.why)
        self._recovery.start_group()
        self._group_overlaps = decision.overlaps
        if not self._needs_state:
            if decision.apply and self.done < decision.done:
                self._apply_commit(())
            elif not decision.apply:
                progress.result_digest = b""
        self._throughput.start_group(decision.speeds)  # after what only some workers do
        return decision

    def _recover(self, decision: CommitDecision) -> None:
        """Send the state to the workers that need it, and resume the step.

        If no worker has the state, all start from the newest checkpoint, or from rank 0's initial state.
        """
        manager, group = self._manager, self._manager.group
        if not decision.donors and not manager.is_first_start:
            exit_without_state(finished=manager.finished)
        if decision.fresh and not self._needs_state:
            for callback in self.on_handover:
                callback()
        donors = decision.donors
        self.state_origin = "kept" if donors else "checkpoint"
        if not donors:
            first, done = self._checkpoints.restore(manager, self._state)
            donors, self.done = (first,), done if manager.rank == first else 0
            self._compression.load_residuals(self._state.residuals)
            self._state.residuals = {}
        receivers = [rank for rank in decision.fresh if rank not in donors]
        self._bitwise_sync.start_group(donors[0], manager.name_of(donors[0]), mixed=decision.mixed)
        if decision.mixed and decision.donors:
            donors, receivers = self._bitwise_sync.split_by_state(group, self.done)
        elif manager.world > 1 and (decision.recovered_live or not decision.donors):
            # They may have the same state, for example by one seed.
            fingerprint = self._state.fingerprint(self.done, is_full=not decision.donors)
            same = ranks_with_same_state(group, fingerprint, donors[0])
            same = same.intersection(decision.recovered_live or receivers)
            receivers = [rank for rank in receivers if rank not in same]
        received = self._blocking_recovery.transfer(self.done, donors, receivers)
        if received is not None:
            metrics.counter(catalogue.RECEIVED_STATES, "blocking").inc()
            self.done = self._state.load(received, manager.name_of(donors[0]))
        if decision.fresh:
            self._share_notes(donors[0], decision.fresh)
        if self._needs_state:
            if manager.rank in decision.recovered_live:
                metrics.counter(catalogue.RECEIVED_STATES, "live").inc()
            self._reducer.clear()
            self.joined_late = bool(decision.donors)
        self._needs_state = False
        if decision.epoch > (self._state.epoch, self._state.epoch_start):  # others have started another one
            self._state.epoch, self._state.epoch_start = decision.epoch
        self._compression.reset_codec()
        self._resume_step(decision)

    def _share_notes(self, donor: int, fresh: Sequence[int]) -> None:
        """Send the donor's notes to the workers that lacked the state, which may be long."""
        notes, group, rank = self._state.notes, self._manager.group, self._manager.rank
        if notes is None:
            return
        receivers = [receiver for receiver in fresh if receiver != donor]
        if rank == donor and receivers:
            content = notes.dump()
            for receiver in receivers:
                send_bytes(group, content, receiver)
        elif rank in receivers:
            notes.load(receive_bytes(group, donor, MAX_SKELETON))

    def _resume_step(self, decision: CommitDecision) -> None:
        """Keep the micro-batches that count, and assign the others again."""
        progress = self._progress
        progress.resume_from(decision, self._manager.rank)
        self._update_state_window()
        self._local_sgd.resume_from(has_progress=bool(progress.completed), is_ahead=bool(progress.ahead))
        if not progress.completed:
            self._reducer.clear()
            self._batch_norms.microbatches.clear()
        self._assign(dict(enumerate(decision.claimed)))


_member_states = msgspec.msgpack.Decoder(MemberState)
