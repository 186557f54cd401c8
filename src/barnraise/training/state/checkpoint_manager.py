"""Checkpoint manager: when to save, which ranks write, and which checkpoint to restore."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from barnraise.checkpoint.files import CheckpointInfo, Checkpoints
from barnraise.checkpoint.holders import UNREADABLE, read_note, write_note
from barnraise.checkpoint.parts import PartFiles
from barnraise.checkpoint.serialization import FlatState
from barnraise.checkpoint.signer import AgentCheckpointSigner, CheckpointSigner
from barnraise.core.decoding import decode
from barnraise.core.errors import AgentError, BarnraiseError, ListenerError, ProtocolError, RunError
from barnraise.core.flow.wait_reporter import WaitReporter
from barnraise.runs.checkpoint_manifest import (
    MOST_PARTS,
    CheckpointManifest,
    HeldCheckpoint,
    PartNumber,
    to_held_checkpoint,
)
from barnraise.training.autotune.profiler import is_dry_run
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.group.interface import GroupManager

log = logging.getLogger("barnraise.training")

_NO_RUN = 1 << 16
_HOLDERS_S = _AGENT_S = 120.0
_POLL_S, _REPORT_S = 2.0, 15.0
_PAUSES = 9.0  # of training, for each second in which it stands still for a checkpoint
_FETCHES = 3  # attempts


class _Candidate(msgspec.Struct, frozen=True, array_like=True):
    """The newest checkpoint that a worker could restore; ``here``: it is complete on its disk."""

    place: int = _NO_RUN  # index of its run among those that this run resumes; its own run has 0
    agreed: bool = False  # agreed checkpoints are preferred to provisional ones
    step: int = 0
    here: bool = True
    awaits: int = 0  # step of a newer checkpoint whose holders are unreachable
    holders: str = ""
    generation: int = 0  # in which it was saved
    awaits_generation: int = 0
    parts: Annotated[tuple[PartNumber, ...], Meta(max_length=MOST_PARTS)] = ()  # empty if it is in one file

    @property
    def rank_key(self) -> tuple[int, bool, int, int]:
        """Return the sort key: the largest one is restored."""
        return -self.place, self.agreed, self.generation, self.step

    @property
    def awaited(self) -> str:
        """Return the holders of the newer checkpoint, as text."""
        return (
            f"{self.holders}, with the checkpoint of step {self.awaits}" if self.awaits > 1 else self.holders
        )

    @property
    def own_age(self) -> tuple[int, int]:
        """Return generation and step of a checkpoint of this run, (0, 0) for another run."""
        return (self.generation, self.step) if self.place == 0 else (0, 0)

    @property
    def awaited_age(self) -> tuple[int, int]:
        return self.awaits_generation, self.awaits


class _Loaded(NamedTuple):
    manifest: CheckpointManifest
    parts: FlatState


class SavedState(Protocol):
    """A training's state, as checkpoints contain it."""

    def flatten(self, done: int, *, is_checkpoint: bool = False) -> FlatState:
        """Return the state; ``done``: committed steps."""

    def load(self, parts: FlatState, source: str = ..., *, is_checkpoint: bool = False) -> int:
        """Load a flattened state. Return its number of committed steps."""


class CheckpointLocations(NamedTuple):
    """Folders of checkpoints: of this run, then of the runs that it resumes, newest first."""

    checkpoints: tuple[Checkpoints, ...]
    signer: CheckpointSigner
    note: Path  # names the machines that saved last

    @classmethod
    def of(cls, worker: WorkerId | None) -> CheckpointLocations | None:
        """Return None if nothing is stored: without an agent, in a container, or in a dry run."""
        folder = os.environ.get("BARNRAISE_CHECKPOINTS", "")
        if worker is None or not folder or is_dry_run():
            return None
        signer = AgentCheckpointSigner(worker.state, worker.run, worker.local_rank, worker.start)
        own = Path(folder)
        earlier = [run for run in os.environ.get("BARNRAISE_RESUMES", "").split(",") if run]
        # The folders of all runs are siblings.
        folders = [(own, worker.run), *((own.parents[1] / run / own.name, run) for run in earlier)]
        checkpoints = tuple(Checkpoints(path, run, signer) for path, run in folders)
        return cls(checkpoints, signer, own.with_name("saved"))


class CheckpointManager:
    """Saves a checkpoint every ``every_s`` seconds on ``copies`` machines, and restores the newest one.

    ``locations`` is None if nothing is stored.
    """

    def __init__(self, locations: CheckpointLocations | None, every_s: float, copies: int) -> None:
        self._locations = locations
        self._every_s = every_s
        self.copies = copies
        self._last = time.monotonic()
        self._pause_s = every_s  # until the next one is due
        self._passed_over: set[tuple[str, int]] = set()  # checkpoints in parts that could not be read

    @property
    def has_disk(self) -> bool:
        """Return True if this worker can write files of checkpoints; one in a sandbox or container cannot."""
        return self._locations is not None

    @property
    def can_save(self) -> bool:
        """Return True on the first worker of each machine with a disk."""
        return self._locations is not None and os.environ.get("LOCAL_RANK", "0") == "0"

    @property
    def maps_folder(self) -> Path | None:
        """Return the folder in which this worker keeps the results of maps, or None."""
        return self._locations.note.with_name("maps") if self._locations and self.can_save else None

    def is_due(self) -> bool:
        """Return True if the last checkpoint is too old."""
        return self._locations is not None and time.monotonic() - self._last >= self._pause_s

    def save(self, manager: GroupManager, savers: Sequence[int], state: SavedState, done: int) -> None:
        """Write a copy on each of the first ``copies`` savers; the other machines note the holders."""
        self._last = time.monotonic()
        if self._locations is None:
            return
        holders = savers[: self.copies]
        if manager.rank in holders:
            info = CheckpointInfo(done, manager.generation, manager.provisional, self.copies)
            self._locations.checkpoints[0].save(state.flatten(done, is_checkpoint=True), info)
        elif holders:
            machines = manager.machines()
            self.note_holders(done, [bytes.fromhex(machines[rank]) for rank in holders], manager.generation)

    # checkpoints in parts

    def part_files(self) -> PartFiles:
        """Return the files of this run's checkpoints in parts. Only a worker with a disk has them."""
        assert self._locations is not None
        return PartFiles(self._locations.checkpoints[0], self._locations.signer)

    def note_duration(self, duration_s: float) -> None:
        """Note that saving a checkpoint in parts has just ended, and how long training stood still for it.

        The next one is due after nine times as long, at least.
        """
        self._last = time.monotonic()
        self._pause_s = max(self._every_s, _PAUSES * duration_s)

    def note_holders(self, done: int, nodes: Sequence[bytes], generation: int) -> None:
        """Write on each machine which ones have the checkpoint of a step."""
        if self.can_save and self._locations is not None:
            try:
                write_note(self._locations.note, done, nodes, generation)
            except OSError as error:
                log.warning("the holders of the checkpoint of step %d were not noted: %s", done, error)

    def choose_parts(self, manager: GroupManager) -> HeldCheckpoint | None:
        """Choose the newest checkpoint in parts that machines in reach have together. None: there is none.

        All workers call it together. Machines that hold a newer one are waited for, as in `restore`.
        """
        waiting = _HolderWait()
        while True:
            remote, unreachable = self._find_remote(manager, None, self._passed_over)
            own = self._candidate(remote) if remote is not None else _Candidate()
            candidates, best = self._agree(manager, own, unreachable, waiting)
            if candidates is None:
                continue
            chosen = candidates[best]
            if not chosen.step:
                return None
            if not chosen.parts:
                raise RunError(
                    f"the checkpoint of step {chosen.step} is of a training whose model was not split",
                    hint="Start a new run for the split model.",
                )
            run, parts = self._run_of(chosen), chosen.parts
            return HeldCheckpoint(run, chosen.step, chosen.agreed, chosen.generation, parts, len(parts))

    def fetch_parts(
        self, held: HeldCheckpoint, numbers: Sequence[int]
    ) -> tuple[PartFiles, CheckpointManifest]:
        """Have parts of a checkpoint on this disk. Return its files and its manifest.

        Only a worker with a disk calls it. Raise BarnraiseError if a part is out of reach.
        """
        assert self._locations is not None
        for tries_left in reversed(range(_FETCHES)):
            try:
                self._locations.signer.fetch(held.run, held.step, numbers)
                break
            except BarnraiseError as error:  # a link may be lost for a moment; an older one costs steps
                if not tries_left:
                    raise
                log.warning("parts of step %d could not be fetched yet: %s", held.step, error.message)
                time.sleep(_POLL_S)
        checkpoints = next(each for each in self._locations.checkpoints if each.run == held.run)
        files = PartFiles(checkpoints, self._locations.signer)
        manifest = files.manifest(held.step)
        if (manifest.generation, len(manifest.parts)) != (held.generation, held.count):
            raise RunError(
                f"the checkpoint of step {held.step} here is another one than that of the other machines",
                hint="An older one is used.",
            )
        return files, manifest

    def _run_of(self, chosen: _Candidate) -> str:
        """Return the run of a checkpoint; empty on a worker without a disk, which gets parts from others."""
        if self._locations is None:
            return ""
        if chosen.place >= len(self._locations.checkpoints):
            raise ProtocolError("another worker has a checkpoint of a run that this run does not resume")
        return self._locations.checkpoints[chosen.place].run

    def pass_over(self, held: HeldCheckpoint) -> None:
        """Choose another checkpoint from now on."""
        self._passed_over.add((held.run, held.step))

    # checkpoints in one file

    def restore(self, manager: GroupManager, state: SavedState) -> tuple[int, int]:
        """Load the newest checkpoint on one rank. Return that rank and its number of committed steps.

        All workers call it together. If the newest checkpoint is on no worker's disk, one of them fetches it.
        Machines that hold a newer one are waited for; without a time limit if there is no other checkpoint.
        """
        given_up: set[tuple[str, int]] = set()
        loaded = self._load_newest(manager)
        waiting = _HolderWait()
        while True:
            remote, unreachable = self._find_remote(manager, loaded, given_up)
            own = self._local_candidate(loaded) if remote is None else self._candidate(remote)
            candidates, best = self._agree(manager, own, unreachable, waiting)
            if candidates is None:
                loaded = self._load_newest(manager)
                continue
            if candidates[best].parts:
                raise RunError(
                    f"the checkpoint of step {candidates[best].step} is of a split model",
                    hint="Resume it with the script that calls run.split.",
                )
            if candidates[best].here:
                break
            if best == manager.rank and remote is not None:
                self._fetch(remote)
                loaded = self._load_newest(manager)
                if self._local_candidate(loaded).rank_key < own.rank_key:
                    given_up.add((remote.run, remote.step))
        if candidates[best].step and best == manager.rank and loaded is not None:
            manifest, parts = loaded
            source = f"the checkpoint of step {manifest.step} of run {manifest.run}"
            log.warning("resuming from %s", source)
            return best, state.load(parts, source, is_checkpoint=True)
        return best, candidates[best].step

    def before_seal(self, callback: Callable[[], None]) -> None:
        """Call a function, on any thread, before a checkpoint of this worker becomes valid."""
        if self._locations is not None:
            self._locations.checkpoints[0].before_seal = callback

    def wait_until_written(self) -> None:
        """Wait until a checkpoint that is being saved is on the disk."""
        if self._locations is not None:
            self._locations.checkpoints[0].wait()

    # candidates

    def _agree(
        self, manager: GroupManager, own: _Candidate, unreachable: _Candidate, waiting: _HolderWait
    ) -> tuple[list[_Candidate] | None, int]:
        """Return the candidates of all workers, and the rank of the best one.

        None: all have waited a little for machines that hold a newer one, and look again.
        """
        if unreachable.awaited_age > own.own_age and waiting.is_patient:
            own = msgspec.structs.replace(
                own,
                awaits=unreachable.awaits,
                holders=unreachable.holders,
                awaits_generation=unreachable.awaits_generation,
            )
        messages = manager.group.all_gather_bytes(msgspec.msgpack.encode(own))
        candidates = [
            decode(_candidates, message, "a worker's newest checkpoint cannot be read")
            for message in messages
        ]
        best = max(
            range(len(candidates)),
            key=lambda rank: (candidates[rank].rank_key, candidates[rank].here, -rank),
        )
        awaited = max(candidates, key=lambda candidate: candidate.awaited_age)
        if awaited.awaited_age > candidates[best].own_age:
            manager.report_waiting(awaited.awaited)
            waiting.sleep(awaited, candidates[best])
            return None, best
        manager.report_waiting("")
        return candidates, best

    def _load_newest(self, manager: GroupManager) -> _Loaded | None:
        """Load the newest valid checkpoint on this machine's disk.

        Only the agent knows whose signatures are valid. It is asked again while it does not answer: an older
        checkpoint would cost steps, and an error would end the run.
        """
        deadline = time.monotonic() + _AGENT_S
        while True:
            try:
                candidates = (checkpoints.newest() for checkpoints in self._searched(manager))
                newest = next((candidate for candidate in candidates if candidate is not None), None)
                return _Loaded(*newest) if newest is not None else None
            except (AgentError, ListenerError) as error:
                if time.monotonic() > deadline:
                    raise
                log.warning("waiting for this machine's agent, to check a checkpoint: %s", error.message)
                time.sleep(_POLL_S)

    def _find_remote(
        self, manager: GroupManager, loaded: _Loaded | None, given_up: set[tuple[str, int]]
    ) -> tuple[HeldCheckpoint | None, _Candidate]:
        """Return a better checkpoint on a reachable machine, and the newest one on unreachable machines.

        Unreachable machines are known only as far as they were noted here.
        """
        if not self._searched(manager) or self._locations is None:
            return None, _Candidate()
        note = read_note(self._locations.note)
        try:
            response = self._locations.signer.newest(given_up, note.holders)
        except BarnraiseError as error:
            why = f"this machine's agent, which cannot list other machines' checkpoints ({error.message})"
            awaits = max(1, note.step)
            return None, _Candidate(awaits=awaits, holders=why, awaits_generation=note.generation)
        unreachable = _Candidate()
        if response.absent:
            names = ", ".join(response.absent)
            unreachable = _Candidate(awaits=note.step, holders=names, awaits_generation=note.generation)
        if note == UNREADABLE:
            holders = f"the machines that saved it (their note {self._locations.note} is damaged)"
            unreachable = _Candidate(awaits=1, holders=holders)
        held = HeldCheckpoint(
            response.run,
            response.step,
            response.agreed,
            response.generation,
            response.parts,
            len(response.parts),
        )
        is_known = any(checkpoints.run == held.run for checkpoints in self._searched(manager))
        is_better = is_known and self._candidate(held).rank_key > self._local_candidate(loaded).rank_key
        return held if is_better else None, unreachable

    def _fetch(self, held: HeldCheckpoint) -> None:
        assert self._locations is not None
        log.warning("fetching the checkpoint of step %d of run %s", held.step, held.run)
        try:
            self._locations.signer.fetch(held.run, held.step)
        except BarnraiseError as error:
            log.warning("the checkpoint could not be fetched: %s", error.message)

    def _searched(self, manager: GroupManager) -> tuple[Checkpoints, ...]:
        """Return the folders to search; none for the first group of a run that resumes no other."""
        if self._locations is None or (manager.generation <= 1 and len(self._locations.checkpoints) == 1):
            return ()
        return self._locations.checkpoints

    def _local_candidate(self, loaded: _Loaded | None) -> _Candidate:
        if loaded is None:
            return _Candidate()
        return msgspec.structs.replace(self._candidate(to_held_checkpoint(loaded.manifest)), here=True)

    def _candidate(self, held: HeldCheckpoint) -> _Candidate:
        assert self._locations is not None
        runs = [checkpoints.run for checkpoints in self._locations.checkpoints]
        return _Candidate(
            runs.index(held.run),
            held.agreed,
            held.step,
            here=False,
            generation=held.generation,
            parts=held.parts,
        )


class _HolderWait:
    """Wait for the holders of a newer checkpoint; limited if there is an older one."""

    def __init__(self) -> None:
        self._reporter = WaitReporter(0.0, _REPORT_S)
        self._has_older = False

    @property
    def is_patient(self) -> bool:
        return not self._has_older or self._reporter.waited_s < _HOLDERS_S

    def sleep(self, awaited: _Candidate, best: _Candidate) -> None:
        """Sleep for a moment, and log now and then what is awaited."""
        self._has_older = best.step > 0
        if self._reporter.is_due():
            log.warning(
                "waiting for %.0f s for %s: %s, and here %s. Switch one of them on; otherwise the run "
                "continues %s",
                self._reporter.waited_s,
                awaited.holders,
                f"the checkpoint of step {awaited.awaits} is there"
                if awaited.awaits > 1
                else "there may be a checkpoint",
                f"is only the one of step {best.step}" if best.step else "is none",
                f"after {_HOLDERS_S:.0f} s"
                if best.step
                else "only after `barnraise unpair` or with a new run",
            )
        time.sleep(_POLL_S)


_candidates = msgspec.msgpack.Decoder(_Candidate)
