"""The steps of a training and their commits: what all members hold, and what becomes of it if a group breaks.

After the last unit that this member has, its sum is reduced over the group, and when every member is known to
hold the same result it is applied: that is a commit. When the group breaks, the survivors meet in the next
one, conclude from what each of them has whether the step counts (``runs.commit``), and go on. In rounds, a
member goes ahead with the next one's units while the sum is on its way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import torch

from barnraise.checkpoint.serialization import FlatState, digest
from barnraise.core.decoding import decode
from barnraise.core.errors import CollectiveError, ProtocolError
from barnraise.runs.commit import CommitDecision, MemberState, decide_commit
from barnraise.runs.sharding import MicroBatch, coverage_sum
from barnraise.training.data.iterable import IterableLoader
from barnraise.training.gradients.compressed_reducer import CompressedReducer
from barnraise.training.group.manager import GroupManager
from barnraise.training.metrics import MetricsLog
from barnraise.training.recovery.blocking_recovery import BlockingRecovery
from barnraise.training.recovery.failures import end_without_state
from barnraise.training.recovery.lasting import raise_if_lasting
from barnraise.training.recovery.live_recovery import CommittedStep, JoiningWorker, RecoveryStats
from barnraise.training.recovery.nurse import RecoveryCoordinator, be_nursed
from barnraise.training.recovery.state_transfer import same_as
from barnraise.training.state.bitwise_sync import ADOPT_EVERY
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.steps.background_task import BackgroundTask
from barnraise.training.steps.commit_vote import UNREADABLE, CommitVote, is_outdated, read_held
from barnraise.training.steps.context import StepContext
from barnraise.training.steps.load_balancing import deal
from barnraise.training.steps.progress import StepProgress, may_go_ahead
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import Sync
from barnraise.training.trace import CommitTrace

log = logging.getLogger("barnraise.training")

_END_S = 5.0


class StepLoop:
    """Of one member."""

    def __init__(
        self,
        circle: GroupManager,
        saving: CheckpointManager,
        training: StepContext,
        journal: MetricsLog,
        pace: Throughput,
    ) -> None:
        self.done = 0  # steps that are committed
        self.clip: float | None = None
        self.wanted: Sync | None = None  # how the first member would have all stay together
        self.on_commit: list[Callable[[], None]] = []
        self._circle = circle
        self._saving = saving
        self._training = training
        self._sums, self._norms, self._state = training.sums, training.norms, training.state
        self._rounds, self._squeeze = training.rounds, CompressedReducer()
        self._anchoring = training.anchoring
        self._journal, self._pace = journal, pace
        self._fresh = True
        self._at_hand = StepProgress()
        self._flight: BackgroundTask[list[CommitVote]] | None = None
        self._all_overlap = False  # this group's members
        self._window = b""
        self.deals = 0  # how often units were dealt anew because a group had changed
        self._nurse, self._newcomer, self._trace = RecoveryCoordinator(circle), JoiningWorker(), CommitTrace()
        self._sharing = BlockingRecovery(circle, training.state)

    @property
    def pending(self) -> list[MicroBatch]:
        """The units that this member has still to compute."""
        return self._at_hand.pending

    def claim(self, unit: MicroBatch, weight: float, *, is_whole: bool = True) -> None:
        """Its gradients are there: they count from now on, and nobody else's for it.

        If not ``is_whole``, they are a part of them, and the next ones belong to the same unit.
        """
        if self._rounds.is_on:
            self._rounds.take(weight)
        else:
            self._sums.take(weight)
        if not is_whole:
            return
        self._norms.end(unit.number)
        self._at_hand.claim(unit.number)
        if self._rounds.is_on:
            self._rounds.note(unit.size, is_last=not self.pending, clip=self.clip)

    def begin_epoch(self) -> None:
        """Where a stream ended, the step at hand had no units yet."""
        if not self._at_hand.units:
            self._deal({})

    def want(self, sync: Sync) -> None:
        """The planner's word, from a thread of its own."""
        self.wanted = sync

    @property
    def is_due(self) -> bool:
        """Whether there is something to finish."""
        return self._at_hand.is_due(has_landed=self._flight is not None and self._flight.has_ended)

    @property
    def at(self) -> tuple[int, int]:
        """The step whose units are pending, and the batches before it."""
        if self._flight is None:
            return self.done, self._state.covered
        return self.done + 1, self._state.covered + self._batches_at_hand()

    @property
    def travels_early(self) -> bool:
        """Whether gradients may travel while backward still runs."""
        return not (self._state.sync.is_local or self._state.sync.is_encoded)

    def committed(self) -> contextlib.AbstractContextManager[None]:
        """The model as it was committed last, also in the middle of a round."""
        return self._rounds.committed()

    @property
    def healed(self) -> RecoveryStats | None:
        return self._newcomer.healed

    def state_digest(self) -> str:
        """Of everything that a commit may change."""
        with self._rounds.committed():
            return digest(self._state.parts(self.done)).hex()

    def finish(self) -> None:
        """Reduce, hear that all hold the result, apply; or meet in the next group and see.

        In rounds the result may come later; if one is on its way, it is waited for, and nothing more: the
        script may look at it before the next leaves.
        """
        if self._flight is not None:
            self.settle()
            return
        work = self._departing()
        if self._may_go_ahead():
            self._flight = BackgroundTask(work)
            self._rounds.go_ahead()
            self._at_hand.go_ahead(
                self._training.data.units(self.at[1], self._state.sync.period), self._dealt
            )
            return
        try:
            words = work()
        except CollectiveError as error:
            self.meet(error)
            return
        self._commit(words)

    def settle(self) -> None:
        """Wait for what is on its way, and commit it."""
        if self._flight is None:
            return
        try:
            words = self._flight.result()
        except CollectiveError as error:
            self._flight = None
            self._rounds.turn_back(self.clip)
            self.meet(error)
            return
        self._flight = None
        self._rounds.land()
        self._commit(words)

    def close(self) -> None:
        """The script is over. A thread with torch's C++ on its stack would abort the interpreter."""
        if self._flight is not None and not self._flight.has_ended:
            self._circle.abort()
            self._flight.wait(_END_S)

    def _commit(self, words: Sequence[CommitVote]) -> None:
        self._apply(words)
        try:
            self._follow_up(words)
        except CollectiveError as error:
            self.meet(error)
            return
        if is_outdated(words, self._circle.generation):
            self.meet()
            return
        self._rounds.go_on()

    @property
    def overlaps(self) -> bool:
        """Whether members may go ahead in rounds. What norms see of units is told with the step."""
        return not (
            self._norms.width or isinstance(self._training.data, IterableLoader) or self._sums.is_on_mps
        )

    def _may_go_ahead(self) -> bool:
        """From what all members know alike."""
        way, coming = self._state.sync, self._state.coming
        if not self._all_overlap or not may_go_ahead(world=self._circle.world, sync=way, coming=coming):
            return False
        return self._training.data.may_go_ahead(self._state.covered + self._batches_at_hand())

    def _departing(self) -> Callable[[], list[CommitVote]]:
        """Sums what was handed in, and returns what every member says of it; from any thread."""
        self._rounds.hand_in(self.clip)
        self._table = self._norms.packed(len(self._at_hand.units))
        sync = self._state.sync
        wish = None
        if self._circle.rank == 0 and self.wanted is not None and self._pace.is_known:
            wish = self.wanted.dealt(self._training.data.batch, self._circle.world)
        coded = None
        if sync.is_encoded:
            whole = self._at_hand.samples * (1.0 if self._rounds.is_on else self._training.scaling.factor())
            first = self._circle, sync, self.done
            coded = partial(self._squeeze.sum, *first, parts=self._sums.parts(), whole=whole)
        word = self._word()

        def work() -> list[CommitVote]:
            self._sums.reduce(self._circle, self._table, coded, wish)
            return self._tell_held(word, self._sums.digest(self.done))

        return work

    def _word(self) -> CommitVote:
        """Of this member, about the step at hand; without what it holds of it."""
        return CommitVote(
            self.done,
            b"",
            0,
            self._pace.speed(),
            dict(self._journal.of_step(self.done - 1)),
            self._saving.is_due(),
            self._window if self._rounds.is_on else self._state.window(self.done),
            self._at_hand.samples,
            self._saving.keeps,
            units=coverage_sum(self._at_hand.claimed),
        )

    def _tell_held(self, word: CommitVote, held: bytes) -> list[CommitVote]:
        """This member holds the result of the step; what every member says of it."""
        self._at_hand.held = held
        count = len(self._at_hand.units)
        self._trace.hold(self._circle, count)
        newest, nursery = self._circle.newest(), self._circle.nursery()
        mine = msgspec.structs.replace(word, digest=held, newest=newest, nursery=nursery)
        said = self._circle.gather(msgspec.msgpack.encode(mine))
        return read_held(said, step=self.done, units=count, mixed=self._anchoring.mixed)

    def _apply(self, words: Sequence[CommitVote]) -> None:
        """The commit. From here on the step counts."""
        batches = self._batches_at_hand()
        self._nurse.note(lambda: self._result(batches))
        self._squeeze.keep()
        self._take_effect(self.clip, batches)
        units = self._at_hand.claimed
        if words:
            self._pace.learn([one.speed for one in words], self._circle.rank)
            self._journal.learn([one.logged for one in words], self.done)
        self._forget_step()
        for notice in self.on_commit:
            notice()
        self._trace.note(self._state, self.done, units)

    def _result(self, batches: int) -> CommittedStep:
        tensors = [*self._sums.result(), self._table.clone()]
        return CommittedStep(self.done + 1, self._state.epoch, self.clip, tensors, batches)

    def _follow_up(self, words: Sequence[CommitVote]) -> None:
        """What belongs between two steps; all members come to the same conclusions from the same words."""
        has_changed = self._nurse.hear({word.nursery for word in words})
        saves = words[0].saves
        if self._anchoring.mixed and (saves or has_changed or self.done % ADOPT_EVERY == 0):
            self._anchoring.adopt(self._circle, self.done)
        if saves:
            keepers = [rank for rank, word in enumerate(words) if word.keeps]
            if self._state.sync.is_encoded:
                self._state.residuals = self._squeeze.pooled(self._circle, self._sums.parts())
            self._saving.save(self._circle, keepers, self._state, self.done)
            self._state.residuals = {}
        self._nurse.nurse(lambda: self._state.parts(self.done), self.done)

    def _batches_at_hand(self) -> int:
        return self._training.data.steps(self._state.covered, self._state.sync.period)

    def _take_effect(self, clip: float | None, batches: int) -> None:
        """The sum over all members becomes a step; newcomers who follow do just this."""
        self._norms.commit(self._table)
        word = self._sums.word()
        if self._rounds.is_on:
            self._rounds.apply()
        else:
            finite = self._training.scaling.scaler is None or self._sums.is_finite()
            gives = self._sums.give(clip, self._training.scaling.factor())
            for step in self._training.optimizer_steps if finite and gives else ():
                step()
            self._training.scaling.follow(finite=finite)
        self._go_forward(batches)
        self._sums.release()
        self.done += 1
        was_local = self._rounds.is_on
        adopted = self._state.hear(word, is_alone=self._circle.world == 1)
        if adopted is not None:
            log.warning("from step %d on: %s", self._state.covered, adopted.sentence())
        if self._rounds.is_on != was_local or (adopted is not None and not adopted.is_encoded):
            self._squeeze.take({})  # what a codec lost of gradients is no part of a change, nor the other way

    def _go_forward(self, batches: int) -> None:
        for _ in range(batches):
            for step in self._training.scheduler_steps:
                step()
        self._state.covered += batches

    def _forget_step(self) -> None:
        """The next one is at hand; this member may be in the midst of it."""
        self._rounds.forget()
        self._sums.clear()
        self._see_window()
        self._at_hand.commit(self._units_at_hand, self._dealt)

    def _see_window(self) -> None:
        """Of what is committed, as long as the model is that."""
        self._window = self._state.window(self.done) if self._rounds.is_on else b""

    def _deal(self, claimed: Mapping[int, frozenset[int]]) -> None:
        self._at_hand.begin(self._units_at_hand(), claimed, self._dealt)

    def _units_at_hand(self) -> tuple[MicroBatch, ...]:
        return self._training.data.units(self._state.covered, self._state.sync.period)

    def _dealt(self, units: Sequence[MicroBatch], claimed: Mapping[int, frozenset[int]]) -> list[MicroBatch]:
        return deal(units, claimed, self._pace, self._circle.world, self._circle.rank)

    # groups

    def meet(self, broken: CollectiveError | None = None) -> None:
        """Until a group holds in which everybody has concluded the same and has the state.

        RunError if none ever will.
        """
        raise_if_lasting(broken)
        if broken is not None:
            log.info("the group broke at step %d: %s", self.done, broken.message)
        self.deals += 1
        self._at_hand.leave_group()
        self._norms.end(None)
        self._sums.forget_unit()
        self._rounds.set_aside()
        while True:
            if self._fresh:
                be_nursed(self._circle, self._newcomer, self._state.most_bytes, self._load, self._follow)
            self._circle.meet(broken)
            try:
                verdict = self._conclude()
                self._heal(verdict)
            except CollectiveError as error:
                raise_if_lasting(error)
                log.info("generation %d broke at once: %s", self._circle.generation, error.message)
                broken = error
                continue
            return

    def _conclude(self) -> CommitDecision:
        at_hand = self._at_hand
        word = MemberState(
            self._fresh,
            self.done,
            at_hand.held,
            tuple(sorted(at_hand.claimed)),
            recovered_live=self._newcomer.done >= 0,
            speed=self._pace.speed(),
            arithmetic=self._anchoring.arithmetic,
            ahead=tuple(sorted(at_hand.ahead)),
            epoch=(self._state.epoch, self._state.epoch_began),
            overlaps=self.overlaps,
        )
        said = self._circle.gather(msgspec.msgpack.encode(word))
        verdict = decide_commit([decode(_word, data, UNREADABLE) for data in said])
        log.info("generation %d of %d: %s", self._circle.generation, self._circle.world, verdict.why)
        self._nurse.begin_group()
        self._all_overlap = verdict.overlaps
        if not word.fresh:
            if verdict.apply and self.done < verdict.done:
                self._apply(())
            elif not verdict.apply:
                at_hand.held = b""
        self._pace.begin_group(verdict.speeds)  # after all that only some members do
        return verdict

    def _heal(self, verdict: CommitDecision) -> None:
        """Whoever has no state gets it from those who have; with nobody, all begin with rank 0's."""
        if not verdict.donors and not self._circle.beginning:
            end_without_state(finished=self._circle.finished)
        donors = verdict.donors
        if not donors:
            first, done = self._saving.restore(self._circle, self._state)
            donors, self.done = (first,), done if self._circle.rank == first else 0
            self._squeeze.take(self._state.residuals)
            self._state.residuals = {}
        fresh = [rank for rank in verdict.fresh if rank not in donors]
        mine = self._circle.rank
        self._anchoring.begin(donors[0], mixed=verdict.mixed)
        if verdict.mixed and verdict.donors:
            donors, fresh = self._anchoring.differing(self._circle, self.done)
        elif verdict.recovered_live or not verdict.donors:  # they may have been made alike, by one seed
            word = self._state.fingerprint(self.done, wholly=not verdict.donors)
            same = same_as(self._circle, word, donors[0])
            fresh = [one for one in fresh if one not in same.intersection(verdict.recovered_live or fresh)]
        came = self._sharing.share(self.done, donors, fresh)
        if came is not None:
            self.done = self._state.load(came)
        if self._fresh:
            self._sums.clear()
        self._fresh = False
        if verdict.epoch > (self._state.epoch, self._state.epoch_began):  # others have begun another one
            self._state.epoch, self._state.epoch_began = verdict.epoch
        self._squeeze.begin_group()
        at_hand = self._at_hand
        at_hand.take_up(verdict, mine)
        self._see_window()
        self._rounds.take_up(goes_on=bool(at_hand.claimed), is_ahead=bool(at_hand.ahead))
        if not at_hand.claimed:
            self._sums.clear()
            self._norms.units.clear()
        self._deal(dict(enumerate(verdict.claimed)))

    # newcomers

    def _load(self, parts: FlatState) -> int:
        self.done = self._state.load(parts)
        self._training.data.catch_up(self._state.covered)
        return self.done

    def _follow(self, result: CommittedStep) -> None:
        *sums, table = result.tensors
        self._sums.take_result(sums)
        if result.epoch != self._state.epoch:
            self._state.epoch, self._state.epoch_began = result.epoch, self._state.covered
        width = self._norms.width
        rows = table.view(torch.float64)
        if rows.numel() % max(width, 1) or (rows.numel() and not width):
            raise ProtocolError("a result is not of this model")
        self._table = rows.reshape(rows.numel() // max(width, 1), width)
        self._take_effect(result.clip, result.batches)
        self._training.data.catch_up(self._state.covered)


_word = msgspec.msgpack.Decoder(MemberState)
