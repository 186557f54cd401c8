"""The steps of a training and their commits: what all members hold, and what becomes of it if a group breaks.

After the last unit that this member has, its sum is reduced over the group, and when every member is known to
hold the same result it is applied: that is a commit. When the group breaks, the survivors meet in the next
one, conclude from what each of them has whether the step counts (``runs.commit``), and go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from backyard.checkpoint.state import Parts, digest
from backyard.core.decoding import decode
from backyard.core.errors import CollectiveError, ProtocolError, RunError
from backyard.core.units import counted
from backyard.runs.commit import Verdict, Word, conclude
from backyard.runs.leases import Unit, lease
from backyard.training.anchoring import ADOPT_EVERY, Anchoring
from backyard.training.beyond import Outward
from backyard.training.circle import Circle
from backyard.training.healing import give_state, receive_state, sketch
from backyard.training.journal import Journal, Logged
from backyard.training.norms import Norms
from backyard.training.nursery import Healed, Newcomer, Nursing, Result
from backyard.training.pace import Pace
from backyard.training.rounds import Rounds
from backyard.training.saving import Saving
from backyard.training.scaling import Scaling
from backyard.training.squeeze import Squeeze
from backyard.training.state import TrainingState
from backyard.training.sums import Sums
from backyard.training.sync import Sync
from backyard.training.trace import Trace

log = logging.getLogger("backyard.training")

_UNREADABLE = "what a member of the group says cannot be read"


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What a member says once it holds the result of a step."""

    step: int
    digest: bytes
    newest: int  # the newest generation that it knows of
    speed: float  # samples per second
    logged: Logged
    saves: bool = False  # it is time for a checkpoint; the first member's word counts
    state: bytes = b""  # a hash of a part of its model, before the step
    samples: int = 0  # of the step
    keeps: bool = False  # it can save: the first worker of its machine, with a disk
    nursery: int = 0  # the newest attempt to heal newcomers that it knows of


class Data(Protocol):
    """What there is to train with; ``step`` counts batches from the beginning."""

    def units(self, step: int, period: int = 1) -> tuple[Unit, ...]: ...

    def steps(self, step: int, period: int) -> int:
        """How many are left of a round of so many that begins there."""


class Training(NamedTuple):
    """What is trained, and all that a commit moves."""

    data: Data
    sums: Sums
    rounds: Rounds
    norms: Norms
    state: TrainingState
    scaling: Scaling
    anchoring: Anchoring
    optimizer_steps: list[Callable[..., Any]]
    scheduler_steps: list[Callable[..., Any]]


class Steps:
    """``pending`` are the units that this member has still to compute for the step at hand."""

    def __init__(
        self, circle: Circle, saving: Saving, training: Training, journal: Journal, pace: Pace
    ) -> None:
        self.done = 0  # steps that are committed
        self.pending: list[Unit] = []
        self.clip: float | None = None
        self.wanted: Sync | None = None  # how the first member would have all stay together
        self.on_commit: list[Callable[[], None]] = []
        self._circle = circle
        self._saving = saving
        self._training = training
        self._sums, self._norms, self._state = training.sums, training.norms, training.state
        self._rounds, self._squeeze = training.rounds, Squeeze()
        self._anchoring = training.anchoring
        self._journal = journal
        self._pace = pace
        self._fresh = True
        self._held = b""
        self._claimed: set[int] = set()
        self._units: tuple[Unit, ...] = ()
        self._nursing: Nursing | None = None
        self._nursery = 0
        self._told: set[int] = set()  # the nurseries that members knew of at the last commit
        self._newcomer = Newcomer()
        self._trace = Trace()
        circle.on_told = self._told_in_meeting

    def claim(self, unit: Unit, weight: float, *, is_whole: bool = True) -> None:
        """Its gradients are there: they count from now on, and nobody else's for it.

        If not ``is_whole``, they are a part of them, and the next ones belong to the same unit.
        """
        self._sums.take(weight, asked_for=is_whole and self._rounds.is_on)
        if not is_whole:
            return
        self._norms.end(unit.number)
        self._claimed.add(unit.number)
        self.pending = [one for one in self.pending if one.number != unit.number]
        if self._rounds.is_on:
            self._rounds.note(unit.size, is_last=not self.pending, clip=self.clip)

    def begin_epoch(self) -> None:
        """Where a stream ended, the step at hand had no units yet."""
        if not self._units:
            self._deal({})

    def want(self, sync: Sync) -> None:
        """The planner's word, from a thread of its own."""
        self.wanted = sync

    @property
    def travels_early(self) -> bool:
        """Whether gradients may travel while backward still runs."""
        return not (self._state.sync.is_local or self._state.sync.is_encoded)

    def committed(self) -> contextlib.AbstractContextManager[None]:
        """The model as it was committed last, also in the middle of a round."""
        return self._rounds.committed()

    @property
    def healed(self) -> Healed | None:
        return self._newcomer.healed

    def state_digest(self) -> str:
        """Of everything that a commit may change."""
        return digest(self._state.parts(self.done)).hex()

    def finish(self) -> None:
        """Reduce, hear that all hold the result, apply; or meet in the next group and see."""
        try:
            words = self._reduce()
        except CollectiveError as error:
            log.info("step %d was not reduced by everybody: %s", self.done, error.message)
            self.meet(error)
            return
        self._apply(words)
        try:
            self._follow_up(words)
        except CollectiveError as error:
            log.info("after step %d: %s", self.done, error.message)
            self.meet(error)
            return
        if max(word.newest for word in words) > self._circle.generation:
            self.meet()

    def _reduce(self) -> list[Held]:
        """What every member says of the sum once it has it."""
        self._rounds.hand_in()
        self._table = self._norms.packed(len(self._units))
        sync = self._state.sync
        wish = None
        if self._circle.rank == 0 and self.wanted is not None and self._pace.is_known:
            batch = sum(unit.size for unit in self._units) // max(1, self._batches_at_hand())
            wish = self.wanted.dealt(batch, self._circle.world)
        coded = partial(self._sum_coded, sync) if sync.is_encoded else None
        self._sums.reduce(self._circle, self._table, coded, wish)
        self._held = self._sums.digest(self.done)
        self._trace.hold(self._circle, len(self._units))
        word = Held(
            self.done,
            self._held,
            self._circle.newest(),
            self._pace.speed(),
            self._journal.of_step(self.done - 1),
            self._saving.is_due(),
            self._state.window(self.done),
            sum(unit.size for unit in self._units),
            self._saving.keeps,
            self._circle.nursery(),
        )
        said = [
            decode(_held, data, _UNREADABLE) for data in self._circle.gather(msgspec.msgpack.encode(word))
        ]
        if {one.step for one in said} != {self.done}:
            raise RunError("members of one group are at different steps", hint="Report this.")
        if len({one.samples for one in said}) > 1:
            raise RunError(
                f"members count {', '.join(str(one.samples) for one in said)} samples in step {self.done}",
                hint="Give them the same data: a stream must yield the same items on every machine.",
            )
        states = 1 if self._anchoring.mixed else len({one.state for one in said})
        if len({one.digest for one in said}) > 1 or states > 1:
            raise RunError(
                f"members hold different bits at step {self.done}",
                hint="The script may change the model differently on each. If your optimizer computes "
                "differently on their processors, call backyard.init(mixed=True).",
            )
        return said

    def _sum_coded(self, sync: Sync, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._squeeze.sum(self._circle, sync, self.done, pairs, self._sums.parts())

    def _apply(self, words: Sequence[Held]) -> None:
        """The commit. From here on the step counts."""
        batches = self._batches_at_hand()
        if self._nursing is not None:
            tensors = [*self._sums.result(), self._table.clone()]
            self._nursing.note(Result(self.done + 1, self._state.epoch, self.clip, tensors, batches))
        self._squeeze.keep()
        self._take_effect(self.clip, batches)
        units = self._claimed
        if words:
            self._pace.learn([one.speed for one in words], self._circle.rank)
            self._journal.learn([one.logged for one in words], self.done)
        self._forget_step()
        for notice in self.on_commit:
            notice()
        self._trace.note(self._state, self.done, units)

    def _follow_up(self, words: Sequence[Held]) -> None:
        """What belongs between two steps; all members come to the same conclusions from the same words."""
        told = {word.nursery for word in words}
        saves = words[0].saves
        if self._anchoring.mixed and (saves or told != self._told or self.done % ADOPT_EVERY == 0):
            self._anchoring.adopt(self._circle, self.done)
        self._told = told
        if saves:
            keepers = [rank for rank, word in enumerate(words) if word.keeps]
            if self._state.sync.is_encoded:
                self._state.residuals = self._squeeze.pooled(self._circle, self._sums.parts())
            self._saving.save(self._circle, keepers, self._state, self.done)
            self._state.residuals = {}
        self._nurse(told)

    def _batches_at_hand(self) -> int:
        return self._training.data.steps(self._state.covered, self._state.sync.period)

    def _take_effect(self, clip: float | None, batches: int) -> None:
        """The sum over all members becomes a step; newcomers who follow do just this."""
        word = self._sums.word()
        self._norms.commit(self._table)
        if self._rounds.is_on:
            batches = self._rounds.apply(batches)
        else:
            finite = self._training.scaling.scaler is None or self._sums.is_finite()
            self._sums.give(clip, self._training.scaling.factor())
            for step in self._training.optimizer_steps if finite else ():
                step()
            self._training.scaling.follow(finite=finite)
        self._go_forward(batches)
        self._sums.release()
        self.done += 1
        if word is not None and word != self._state.sync:
            log.warning("from step %d on: %s", self._state.covered, word.sentence())
            self._state.adopt(word)

    def _go_forward(self, batches: int) -> None:
        for _ in range(batches):
            for step in self._training.scheduler_steps:
                step()
        self._state.covered += batches

    def begin_with(self, outward: Outward) -> None:
        """A hub's state is where this training begins, and where its rounds go."""
        self._rounds.outward = outward
        self._go_forward(outward.begin())

    def _forget_step(self) -> None:
        self._held, self._claimed = b"", set()
        self._rounds.forget()
        self._sums.clear()
        self._deal({})

    def _deal(self, claimed: dict[int, frozenset[int]]) -> None:
        self._units = self._training.data.units(self._state.covered, self._state.sync.period)
        world, mine = self._circle.world, self._circle.rank
        shares = self._pace.shares if len(self._pace.shares) == world else [1.0] * world
        dealt = lease(self._units, claimed, shares, self._pace.due(world))
        counts = [len(dealt[rank]) + len(claimed.get(rank, ())) for rank in range(world)]
        for rank in self._pace.dealt(counts) if len(self._units) >= world else ():
            if mine in (0, rank):
                log.warning(
                    "member %d is too slow to be waited for (%.3g samples/s, all together %.3g): it gets no "
                    "units for a while, and is tried again",
                    rank,
                    shares[rank],
                    sum(shares),
                )
        self.pending = [self._units[number] for number in dealt[mine]]

    # groups

    def meet(self, broken: CollectiveError | None = None) -> None:
        """Until a group holds in which everybody has concluded the same and has the state."""
        self._norms.end(None)
        self._sums.forget_unit()
        self._rounds.set_aside()
        while True:
            if self._fresh:
                self._be_nursed()
            self._circle.meet(broken)
            try:
                verdict = self._conclude()
                self._heal(verdict)
            except CollectiveError as error:
                log.info("generation %d broke at once: %s", self._circle.generation, error.message)
                broken = error
                continue
            return

    def _conclude(self) -> Verdict:
        units = tuple(sorted(self._claimed))
        word = Word(
            self._fresh,
            self.done,
            self._held,
            units,
            nursed=self._newcomer.done >= 0,
            speed=self._pace.speed(),
            arithmetic=self._anchoring.arithmetic,
        )
        said = self._circle.gather(msgspec.msgpack.encode(word))
        verdict = conclude([decode(_word, data, _UNREADABLE) for data in said])
        log.info("generation %d of %d: %s", self._circle.generation, self._circle.world, verdict.why)
        self._pace.begin_group(verdict.speeds)
        self._told = {0}
        if not word.fresh:
            if verdict.apply and self.done < verdict.done:
                self._apply(())
            elif not verdict.apply:
                self._held = b""
        return verdict

    def _heal(self, verdict: Verdict) -> None:
        """Whoever has no state gets it from those who have; with nobody, all begin with rank 0's."""
        if not verdict.donors and not self._circle.beginning:
            if self._circle.finished:
                log.warning("the others have finished before this worker could join them")
                raise SystemExit(0)
            log.error("everybody who had the state is gone; this worker ends, to begin with a checkpoint")
            # Nothing of the script may catch it and go on: it would begin anew beside the run.
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
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
        elif verdict.nursed:
            said = self._circle.gather(sketch(self._state.parts(self.done)))
            fresh = [one for one in fresh if one not in verdict.nursed or said[one] != said[donors[0]]]
        if fresh and mine in donors:
            level = logging.INFO if self._circle.beginning else logging.WARNING
            log.log(level, "training waits while the state is sent to %s", counted(len(fresh), "newcomer"))
            give_state(self._circle, mine, self._state.parts(self.done), donors, fresh)
        elif mine in fresh:
            self.done = self._state.load(receive_state(self._circle, donors, self._state.most_bytes))
        if self._fresh:
            self._sums.clear()
        self._fresh = False
        claimed = dict(enumerate(verdict.claimed))
        self._claimed = set(claimed[mine])
        self._rounds.take_up(goes_on=bool(self._claimed))
        if not self._claimed:
            self._sums.clear()
            self._norms.units.clear()
        self._deal(claimed)

    # newcomers

    def _nurse(self, told: set[int]) -> None:
        """After a commit at which all members know of the same newcomers: begin to heal them, or again."""
        if len(told) != 1 or told == {self._nursery}:
            return
        (number,) = told
        if not number:
            if self._nursing is not None and self._circle.newest() <= self._circle.generation:
                self._nursing.finish()  # they are gone
                self._nursing = None
            return
        opener = self._circle.nursery_opener(number)
        if opener is None:
            return  # there is a newer attempt already
        self._nursery = number
        if self._nursing is None or self._nursing.is_stale:
            self._nursing = Nursing(self._state.parts(self.done), self.done)
        self._nursing.begin(opener)

    def _told_in_meeting(self, nursery: int) -> None:
        if self._nursing is not None:
            self._nursing.finish()
            self._nursing = self._nursing if nursery else None

    def _be_nursed(self) -> None:
        """Before this worker is let in: get the state, and follow the others, who go on meanwhile."""
        while (room := self._circle.await_nursery()) is not None:
            try:
                most = self._state.most_bytes
                self._newcomer.be_nursed(room, most, self._load, self._follow, self._circle.say_near)
            except (CollectiveError, ProtocolError) as error:
                log.info("healing is tried again: %s", error.message)
                self._circle.nursery_broke()
            finally:
                room.close()

    def _load(self, parts: Parts) -> int:
        self.done = self._state.load(parts)
        return self.done

    def _follow(self, result: Result) -> None:
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


_word = msgspec.msgpack.Decoder(Word)
_held = msgspec.msgpack.Decoder(Held)
