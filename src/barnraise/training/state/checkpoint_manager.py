"""When the state is saved, by whom, and what a training begins with after everybody died."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from barnraise.checkpoint.files import CheckpointInfo, Checkpoints
from barnraise.checkpoint.holders import UNREADABLE, note_saved, read_saved
from barnraise.checkpoint.serialization import FlatState
from barnraise.checkpoint.signer import AgentCheckpointSigner, CheckpointSigner
from barnraise.core.decoding import decode
from barnraise.core.errors import BarnraiseError
from barnraise.core.flow.wait_reporter import WaitReporter
from barnraise.runs.checkpoint_manifest import CheckpointManifest, HeldCheckpoint, held_of
from barnraise.training.autotune.profiler import is_dry_run
from barnraise.training.group.manager import GroupManager, WorkerId
from barnraise.training.state.training_state import TrainingState

log = logging.getLogger("barnraise.training")

_NOWHERE = 1 << 16
_HOLDERS_S = 120.0
_LOOK_S, _SAY_S = 2.0, 15.0


class _Found(msgspec.Struct, frozen=True, array_like=True):
    """The newest checkpoint that a member could begin with; ``here``: it is on its disk, and whole."""

    place: int = _NOWHERE  # of its run among those that this one goes on with; its own has 0
    agreed: bool = False  # such count before provisional ones
    step: int = 0
    here: bool = True
    awaits: int = 0  # the step of a newer one, whose holders are not in reach
    holders: str = ""
    generation: int = 0  # in which it was saved
    awaits_generation: int = 0

    @property
    def worth(self) -> tuple[int, bool, int, int]:
        return -self.place, self.agreed, self.generation, self.step

    @property
    def awaited(self) -> str:
        return (
            f"{self.holders}, with the checkpoint of step {self.awaits}" if self.awaits > 1 else self.holders
        )

    @property
    def own_age(self) -> tuple[int, int]:
        """Of this run itself; as with `HeldCheckpoint`."""
        return (self.generation, self.step) if self.place == 0 else (0, 0)

    @property
    def awaited_age(self) -> tuple[int, int]:
        return self.awaits_generation, self.awaits


class _Loaded(NamedTuple):
    manifest: CheckpointManifest
    parts: FlatState


class CheckpointLocations(NamedTuple):
    """Where checkpoints are: this run's own, then those of the runs that it goes on with, newest first."""

    checkpoints: tuple[Checkpoints, ...]
    notary: CheckpointSigner
    note: Path  # who saved last, for a member that does not

    @classmethod
    def of(cls, place: WorkerId | None) -> CheckpointLocations | None:
        """None where nothing is kept: alone, in a container, or in a dry run."""
        folder = os.environ.get("BARNRAISE_CHECKPOINTS", "")
        if place is None or not folder or is_dry_run():
            return None
        notary = AgentCheckpointSigner(place.state, place.run, place.local_rank, place.start)
        own = Path(folder)
        earlier = [run for run in os.environ.get("BARNRAISE_RESUMES", "").split(",") if run]
        # The folders of all runs lie beside each other.
        places = [(own, place.run), *((own.parents[1] / run / own.name, run) for run in earlier)]
        kept = tuple(Checkpoints(path, run, notary) for path, run in places)
        return cls(kept, notary, own.with_name("saved"))


class CheckpointManager:
    """``shelves`` is None where nothing is kept."""

    def __init__(self, shelves: CheckpointLocations | None, every_s: float, copies: int) -> None:
        self._shelves = shelves
        self._every_s = every_s
        self._copies = copies
        self._last = time.monotonic()

    @property
    def keeps(self) -> bool:
        """Whether this member can save: one of each machine does."""
        return self._shelves is not None and os.environ.get("LOCAL_RANK", "0") == "0"

    def is_due(self) -> bool:
        return self._shelves is not None and time.monotonic() - self._last >= self._every_s

    def save(self, circle: GroupManager, keepers: Sequence[int], state: TrainingState, done: int) -> None:
        """The first of those who can each write a copy, every one on another machine; the others note who."""
        self._last = time.monotonic()
        if self._shelves is None:
            return
        holders = keepers[: self._copies]
        if circle.rank in holders:
            facts = CheckpointInfo(done, circle.generation, circle.provisional, self._copies)
            self._shelves.checkpoints[0].save(state.parts(done), facts)
        elif self.keeps and holders:
            machines = circle.machines()
            nodes = [bytes.fromhex(machines[rank]) for rank in holders]
            try:
                note_saved(self._shelves.note, done, nodes, circle.generation)
            except OSError as error:
                log.warning("who saved step %d could not be noted: %s", done, error)

    def restore(self, circle: GroupManager, state: TrainingState) -> tuple[int, int]:
        """Nobody has a state: who begins, and with how many steps behind it. The newest checkpoint counts.

        If it is on no member's disk, one of them has it brought from whatever machine holds it. Machines that
        are known to hold a newer one are waited for, without end if there is none at all: nothing begins anew
        that was saved.
        """
        given_up: set[tuple[str, int]] = set()
        loaded = self._newest_here(circle)
        waiting = _Waiting()
        while True:
            away, absent = self._newest_away(circle, loaded, given_up)
            mine = self._word(loaded) if away is None else self._word_of(away)
            if absent.awaited_age > mine.own_age and waiting.is_patient:
                mine = msgspec.structs.replace(
                    mine,
                    awaits=absent.awaits,
                    holders=absent.holders,
                    awaits_generation=absent.awaits_generation,
                )
            said = circle.gather(msgspec.msgpack.encode(mine))
            words = [decode(_decoder, data, "what a member has saved cannot be read") for data in said]
            best = max(range(len(words)), key=lambda rank: (words[rank].worth, words[rank].here, -rank))
            awaited = max(words, key=lambda one: one.awaited_age)
            if awaited.awaited_age > words[best].own_age:
                circle.say_waits(awaited.awaited)
                waiting.pause(awaited, words[best])
                loaded = self._newest_here(circle)
                continue
            circle.say_waits("")
            if words[best].here:
                break
            if best == circle.rank and away is not None:
                self._bring(away)
                loaded = self._newest_here(circle)
                if self._word(loaded).worth < mine.worth:
                    given_up.add((away.run, away.step))
        if words[best].step and best == circle.rank and loaded is not None:
            manifest, parts = loaded
            log.warning("going on from the checkpoint of step %d of run %s", manifest.step, manifest.run)
            return best, state.load(parts)
        return best, words[best].step

    def finish(self) -> None:
        if self._shelves is not None:
            self._shelves.checkpoints[0].wait()

    # what there is

    def _newest_here(self, circle: GroupManager) -> _Loaded | None:
        for checkpoints in self._possible(circle):
            found = checkpoints.newest()
            if found is not None:
                return _Loaded(*found)
        return None

    def _newest_away(
        self, circle: GroupManager, loaded: _Loaded | None, given_up: set[tuple[str, int]]
    ) -> tuple[HeldCheckpoint | None, _Found]:
        """What the machines in reach have, if it is better than what this one could read itself; and what
        those have that are not in reach, as far as it was noted here."""
        if not self._possible(circle) or self._shelves is None:
            return None, _Found()
        saved = read_saved(self._shelves.note)
        try:
            told = self._shelves.notary.newest(given_up, saved.holders)
        except BarnraiseError as error:
            why = f"this machine's agent, which could not say what others have saved ({error.message})"
            return None, _Found(awaits=max(1, saved.step), holders=why, awaits_generation=saved.generation)
        absent = _Found()
        if told.absent:
            names = ", ".join(told.absent)
            absent = _Found(awaits=saved.step, holders=names, awaits_generation=saved.generation)
        if saved == UNREADABLE:
            absent = _Found(awaits=1, holders=f"whoever saved (the note {self._shelves.note} is damaged)")
        held = HeldCheckpoint(told.run, told.step, told.agreed, told.generation)
        is_known = any(one.run == held.run for one in self._possible(circle))
        is_better = is_known and self._word_of(held).worth > self._word(loaded).worth
        return held if is_better else None, absent

    def _bring(self, held: HeldCheckpoint) -> None:
        assert self._shelves is not None
        log.warning("the checkpoint of step %d of run %s is brought here", held.step, held.run)
        try:
            self._shelves.notary.bring(held.run, held.step)
        except BarnraiseError as error:
            log.warning("it could not be brought: %s", error.message)

    def _possible(self, circle: GroupManager) -> tuple[Checkpoints, ...]:
        """The first group of a run that goes on with no other has nothing to look for."""
        if self._shelves is None or (circle.generation <= 1 and len(self._shelves.checkpoints) == 1):
            return ()
        return self._shelves.checkpoints

    def _word(self, loaded: _Loaded | None) -> _Found:
        if loaded is None:
            return _Found()
        return msgspec.structs.replace(self._word_of(held_of(loaded.manifest)), here=True)

    def _word_of(self, held: HeldCheckpoint) -> _Found:
        assert self._shelves is not None
        runs = [one.run for one in self._shelves.checkpoints]
        return _Found(runs.index(held.run), held.agreed, held.step, here=False, generation=held.generation)


class _Waiting:
    """For the holders of a checkpoint. If there is an older one, only for a while."""

    def __init__(self) -> None:
        self._reporter = WaitReporter(0.0, _SAY_S)
        self._has_any = False

    @property
    def is_patient(self) -> bool:
        return not self._has_any or self._reporter.waited_s < _HOLDERS_S

    def pause(self, awaited: _Found, best: _Found) -> None:
        self._has_any = best.step > 0
        if self._reporter.is_due():
            log.warning(
                "waiting for %.0f s for %s: %s, and here %s. Switch one of them on; without them it goes on "
                "%s",
                self._reporter.waited_s,
                awaited.holders,
                f"the checkpoint of step {awaited.awaits} is there"
                if awaited.awaits > 1
                else "there may be a checkpoint",
                f"only that of step {best.step}" if best.step else "is none",
                f"after {_HOLDERS_S:.0f} s"
                if best.step
                else "only by your word: barnraise unpair, or a new run",
            )
        time.sleep(_LOOK_S)


_decoder = msgspec.msgpack.Decoder(_Found)
