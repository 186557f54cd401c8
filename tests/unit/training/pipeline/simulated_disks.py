"""Disks of the machines of simulated runs. What agents do about checkpoints is done without a network."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from barnraise.agent.checkpoints.local_store import LocalCheckpoints
from barnraise.agent_client.run_requests import NewestCheckpointResponse
from barnraise.artifacts import ArtifactStore
from barnraise.checkpoint.files import Checkpoints
from barnraise.core.errors import BarnraiseError, RunError
from barnraise.identity import NodeKey
from barnraise.runs.checkpoint_manifest import (
    CheckpointSignature,
    FoundCheckpoint,
    HeldCheckpoint,
    find_checkpoints,
    newest_checkpoint,
    plan_fetch,
    sign,
)
from barnraise.training.state.checkpoint_manager import CheckpointLocations, CheckpointManager

KEY = NodeKey.generate()
SIGNERS = {KEY.id.raw}
FIRST, SECOND = "train-first", "train-second"


def node_of(machine: str) -> bytes:
    """Return the node id of a machine."""
    return machine.encode().ljust(32, b"\0")


class SimulatedDisks:
    """Disks of machines, each with one letter. ``online``: those that are reached; None for all.

    ``sent``: the parts that one machine has fetched from another one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = ArtifactStore(folder / "store")
        self.machines: set[str] = set()
        self.online: Collection[str] | None = None
        self.sent: list[tuple[str, str, int]] = []

    def local(self, machine: str) -> LocalCheckpoints:
        """Return the checkpoints on the disk of a machine."""
        return LocalCheckpoints(self._folder / machine / "runs", self._store, KEY)

    def reached(self) -> list[str]:
        """Return the machines that are reached."""
        return sorted(self.machines if self.online is None else self.machines.intersection(self.online))

    def find(self, runs: Sequence[str], *, incomplete: bool = False) -> list[FoundCheckpoint[str]]:
        """Return the checkpoints that the machines in reach have together."""
        held = {
            machine: [each for run in runs for each in self.local(machine).held(run, SIGNERS)]
            for machine in self.reached()
        }
        return find_checkpoints(held, incomplete=incomplete)

    def newest(self, *runs: str) -> HeldCheckpoint | None:
        """Return the newest of these checkpoints."""
        return newest_checkpoint((found.held for found in self.find(runs)), runs)

    def files(self, run: str) -> list[Path]:
        """Return the parts of all machines."""
        return sorted(self._folder.glob(f"*/runs/{run}/checkpoints/step-*/part-*"))

    def manager(
        self, machine: str, run: str, earlier: Sequence[str] = (), copies: int = 2
    ) -> CheckpointManager:
        """Return the checkpoint manager of a worker on a machine."""
        self.machines.add(machine)
        agent = SimulatedAgent(self, machine, run, earlier)
        folders = [(each, self.local(machine).folder(each)) for each in (run, *earlier)]
        own = folders[0][1]
        own.mkdir(parents=True, exist_ok=True)
        checkpoints = tuple(Checkpoints(folder, each, agent) for each, folder in folders)
        return EveryStep(CheckpointLocations(checkpoints, agent, own.with_name("saved")), 0.0, copies)

    def managers(
        self, run: str, *earlier: str, copies: int = 2, without: str = ""
    ) -> Callable[[str], CheckpointManager]:
        """Return what makes the checkpoint manager of each machine. ``without``: machines without a disk."""

        def make(machine: str) -> CheckpointManager:
            if machine in without:
                return EveryStep(None, 0.0, copies)
            return self.manager(machine, run, earlier, copies)

        return make


class EveryStep(CheckpointManager):
    """Checkpoint manager that saves after every step."""

    def is_due(self) -> bool:
        return self.has_disk


class SimulatedAgent:
    """Agent of a machine, as its workers see it. Fetched files go from disk to disk."""

    def __init__(self, disks: SimulatedDisks, machine: str, run: str, earlier: Sequence[str]) -> None:
        self._disks, self._machine = disks, machine
        self._run, self._earlier = run, tuple(earlier)

    def sign(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        return sign(KEY, self._run, step, fingerprint)

    def signers(self, run: str) -> Collection[bytes]:
        return SIGNERS

    def newest(
        self, passing_over: Collection[tuple[str, int]], awaiting: Sequence[bytes]
    ) -> NewestCheckpointResponse:
        runs = (self._run, *self._earlier)
        found = {
            each.held: each.holders
            for each in self._disks.find(runs)
            if (each.held.run, each.held.step) not in passing_over
        }
        here = {node_of(machine) for machine in self._disks.reached()}
        absent = tuple(node.hex() for node in awaiting if node not in here)
        best = newest_checkpoint(found, runs)
        if best is None:
            return NewestCheckpointResponse(absent=absent)
        parts = sorted({part for own in found[best].values() for part in own})
        return NewestCheckpointResponse(
            best.run,
            best.step,
            best.agreed,
            tuple(found[best]),
            absent=absent,
            generation=best.generation,
            parts=tuple(parts),
        )

    def fetch(self, run: str, step: int, parts: Collection[int] = ()) -> None:
        found = [each for each in self._disks.find([run]) if each.held.step == step]
        newest = max(found, key=lambda each: each.held.age, default=None)
        if newest is None:
            raise RunError("no machine has it", hint="Switch them on.")
        own = self._disks.local(self._machine)
        missing = own.missing_parts(newest.held, parts, SIGNERS)
        holders = {name: held for name, held in newest.holders.items() if name != self._machine}
        while missing:
            plan = plan_fetch(missing, holders)
            if plan is None:
                raise RunError("no machine has all of its parts", hint="Switch them on.")
            source, numbers = plan
            try:
                packed = self._disks.local(source).publish(run, step, SIGNERS, numbers)
                own.keep(packed.manifest, run, step, SIGNERS)
            except BarnraiseError:
                pass
            else:
                left = own.missing_parts(newest.held, missing, SIGNERS)
                self._disks.sent += [(source, self._machine, part) for part in sorted(missing - left)]
                missing = left
            del holders[source]
