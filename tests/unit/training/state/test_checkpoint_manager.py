"""Restore after all workers died: the newest reachable checkpoint of any machine is used."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from barnraise.agent_client.run_requests import NewestCheckpointResponse
from barnraise.checkpoint.files import CheckpointInfo, Checkpoints
from barnraise.checkpoint.holders import UNREADABLE, HolderNote, read_note, write_note
from barnraise.checkpoint.serialization import flatten
from barnraise.core.errors import AgentError, RunError
from barnraise.identity import NodeKey
from barnraise.runs.checkpoint_manifest import CheckpointSignature, HeldCheckpoint, newest_checkpoint, sign
from barnraise.training.metrics import MetricsLog
from barnraise.training.state import checkpoint_manager as manager_module
from barnraise.training.state.checkpoint_manager import CheckpointLocations, CheckpointManager

KEY = NodeKey.generate()
RUN, EARLIER = "train-abcd", "train-0000"


class Cluster:
    """Checkpoints of two runs on some machine; an agent fetches them by copying folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: set[HeldCheckpoint] = set()
        self.absent: Callable[[], Collection[bytes]] = lambda: ()
        self.brought: list[tuple[str, int]] = []

    def has(self, run: str, step: int, *, agreed: bool = True, generation: int = 1) -> None:
        notary = Machine(self, self.folder, run)
        save(Checkpoints(self.folder / run, run, notary), step, agreed=agreed, generation=generation)
        self.held.add(HeldCheckpoint(run, step, agreed, generation))


class Machine:
    """Agent of one of the workers."""

    def __init__(self, cluster: Cluster, home: Path, run: str = RUN) -> None:
        self.cluster, self.home, self.run = cluster, home, run
        self.cannot: set[int] = set()
        self.silent = 0  # how many questions about signers the agent does not answer

    def sign(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        return sign(KEY, self.run, step, fingerprint)

    def signers(self, run: str) -> Collection[bytes]:
        if self.silent:
            self.silent -= 1
            raise AgentError("the agent of this machine did not answer within 30 s")
        return {KEY.id.raw}

    def newest(
        self, passing_over: Collection[tuple[str, int]], awaiting: Sequence[bytes]
    ) -> NewestCheckpointResponse:
        away = self.cluster.absent()
        absent = tuple(node.hex()[:2] for node in awaiting if node in away)
        known = [
            checkpoint
            for checkpoint in self.cluster.held
            if (checkpoint.run, checkpoint.step) not in passing_over
        ]
        best = newest_checkpoint(known, [RUN, EARLIER])
        if best is None:
            return NewestCheckpointResponse(absent=absent)
        return NewestCheckpointResponse(
            best.run, best.step, best.agreed, ("there",), absent=absent, generation=best.generation
        )

    def fetch(self, run: str, step: int) -> None:
        if step in self.cannot:
            raise RunError("no machine has it any more")
        self.cluster.brought.append((run, step))
        name = f"step-{step:08}"
        shutil.copytree(self.cluster.folder / run / name, self.home / run / name, dirs_exist_ok=True)


def save(checkpoints: Checkpoints, step: int, *, agreed: bool = True, generation: int = 1) -> None:
    state = flatten({"w": torch.full((2,), float(step)), "done": step})
    checkpoints.save(state, CheckpointInfo(step, generation, not agreed))
    checkpoints.wait()


class Group:
    """Workers that gather messages, each on a thread."""

    def __init__(self, size: int) -> None:
        self.size, self.words = size, [b""] * size
        self.waits: list[str] = []
        self.barrier = threading.Barrier(size, timeout=90.0)

    def member(self, rank: int, generation: int) -> Any:
        group = self

        class Manager:
            def __init__(self) -> None:
                self.rank, self.world, self.generation = rank, group.size, generation
                self.group = self

            def report_waiting(self, reason: str) -> None:
                group.waits.append(reason)

            def all_gather_bytes(self, message: bytes) -> list[bytes]:
                group.words[rank] = message
                group.barrier.wait()
                messages = list(group.words)
                group.barrier.wait()
                return messages

        return Manager()


class State:
    """Training state that records what was loaded."""

    def __init__(self) -> None:
        self.loaded = 0

    def load(self, parts: Any, source: str, *, is_checkpoint: bool) -> int:
        assert "checkpoint of step" in source
        assert is_checkpoint
        self.loaded = int(parts.tensors[0][0])
        return self.loaded


class Yard:
    """Machines that start a run together, each with its own disk."""

    def __init__(self, folder: Path, size: int, *runs: str) -> None:
        self.cluster = Cluster(folder / "cluster")
        self.machines = [Machine(self.cluster, folder / str(rank)) for rank in range(size)]
        self.runs = runs
        self.waits: list[str] = []  # what members said to their agents

    def own(self, rank: int, run: str) -> Checkpoints:
        machine = self.machines[rank]
        return Checkpoints(machine.home / run, run, machine)

    def note(self, rank: int) -> Path:
        return self.machines[rank].home / "saved"

    def begin(self, generation: int = 2) -> list[tuple[int, int, int]]:
        """Return for each worker: the rank that starts, its steps, and what this worker loaded."""
        group = Group(len(self.machines))
        outcomes: list[tuple[int, int, int]] = [(-1, -1, -1)] * group.size

        def run(rank: int) -> None:
            own = tuple(self.own(rank, name) for name in self.runs)
            saving = CheckpointManager(
                CheckpointLocations(own, self.machines[rank], self.note(rank)), 60.0, 2
            )
            state: Any = State()
            first, done = saving.restore(group.member(rank, generation), state)
            outcomes[rank] = first, done, state.loaded

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(group.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        self.waits = group.waits
        return outcomes


def test_local_checkpoint_is_not_fetched(tmp_path: Path) -> None:
    yard = Yard(tmp_path, 3, RUN)
    yard.cluster.has(RUN, 40)
    save(yard.own(1, RUN), 40)
    save(yard.own(2, RUN), 30)
    assert yard.begin() == [(1, 40, 0), (1, 40, 40), (1, 40, 0)]
    assert yard.cluster.brought == []


def test_silent_agent_is_asked_again_and_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "_POLL_S", 0.01)
    yard = Yard(tmp_path, 2, RUN)
    yard.cluster.has(RUN, 40)
    save(yard.own(1, RUN), 40)
    yard.machines[1].silent = 3
    assert yard.begin() == [(1, 40, 0), (1, 40, 40)]
    assert (yard.machines[1].silent, yard.cluster.brought) == (0, [])


def test_remote_checkpoint_is_fetched_by_one_worker(tmp_path: Path) -> None:
    yard = Yard(tmp_path, 3, RUN, EARLIER)
    yard.cluster.has(EARLIER, 50)
    save(yard.own(2, EARLIER), 40)
    assert yard.begin() == [(0, 50, 50), (0, 50, 0), (0, 50, 0)]
    assert yard.cluster.brought == [(EARLIER, 50)]


def test_unavailable_checkpoint_is_skipped_for_next(tmp_path: Path) -> None:
    yard = Yard(tmp_path, 2, RUN)
    yard.cluster.has(RUN, 50)
    yard.cluster.has(RUN, 60)
    for machine in yard.machines:
        machine.cannot = {60}
    assert yard.begin() == [(0, 50, 50), (0, 50, 0)]


def test_damaged_fetched_checkpoint_is_skipped(tmp_path: Path) -> None:
    yard = Yard(tmp_path, 2, RUN)
    yard.cluster.has(RUN, 60)
    (yard.cluster.folder / RUN / "step-00000060" / "state.safetensors").write_bytes(b"torn")
    save(yard.own(1, RUN), 20)
    assert yard.begin() == [(1, 20, 0), (1, 20, 20)]
    assert len(yard.cluster.brought) == 2, "each has tried"


@pytest.mark.parametrize("generation", [1, 2])
def test_restore_without_checkpoint_starts_with_rank_0(tmp_path: Path, generation: int) -> None:
    assert Yard(tmp_path, 2, RUN).begin(generation) == [(0, 0, 0), (0, 0, 0)]


def test_first_start_does_not_search_checkpoints(tmp_path: Path) -> None:
    yard = Yard(tmp_path, 2, RUN)
    yard.cluster.has(RUN, 60)
    assert yard.begin(generation=1) == [(0, 0, 0), (0, 0, 0)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make sleeps of the checkpoint manager instant, and count them."""
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("barnraise.training.state.checkpoint_manager.time", clock)
    return pauses


@pytest.mark.parametrize("older", [0, 20])
def test_holders_of_newer_checkpoint_are_waited_for(
    tmp_path: Path, quick: list[float], caplog: pytest.LogCaptureFixture, older: int
) -> None:
    yard = Yard(tmp_path, 2, RUN)
    holder = b"\xaa" * 32
    for machine in yard.machines:
        machine.home.mkdir(parents=True)
    write_note(yard.note(1), 60, [holder], 1)
    if older:
        save(yard.own(0, RUN), older)

    switched_on = threading.Lock()

    def absent() -> Collection[bytes]:
        if len(quick) < 6:
            return {holder}
        with switched_on:
            if not yard.cluster.held:
                yard.cluster.has(RUN, 60)
        return ()

    yard.cluster.absent = absent
    assert {outcome[1] for outcome in yard.begin()} == {60}
    assert "for aa: the checkpoint of step 60 is there" in caplog.text
    assert (yard.waits[0], yard.waits[-1]) == ("aa, with the checkpoint of step 60", "")


def test_older_checkpoint_is_used_after_timeout(
    tmp_path: Path, quick: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.training.state.checkpoint_manager._HOLDERS_S", -1.0)
    yard = Yard(tmp_path, 2, RUN)
    yard.machines[1].home.mkdir(parents=True)
    write_note(yard.note(1), 60, [b"\xaa" * 32], 1)
    save(yard.own(0, RUN), 20)
    yard.cluster.absent = lambda: {b"\xaa" * 32}
    assert yard.begin() == [(0, 20, 20), (0, 20, 0)]
    assert quick


def test_later_generation_beats_higher_step(tmp_path: Path, quick: list[float]) -> None:
    yard = Yard(tmp_path, 3, RUN)
    save(yard.own(0, RUN), 60, generation=2)
    save(yard.own(1, RUN), 40, generation=5)
    assert {outcome[:2] for outcome in yard.begin(generation=7)} == {(1, 40)}
    away = Yard(tmp_path / "away", 1, RUN)
    save(away.own(0, RUN), 60, generation=2)
    away.cluster.has(RUN, 40, generation=5)
    assert away.begin(generation=7) == [(0, 40, 40)]
    assert not quick
    waits = Yard(tmp_path / "waits", 1, RUN)
    save(waits.own(0, RUN), 60, generation=2)
    write_note(waits.note(0), 40, [b"\xaa" * 32], 5)

    def absent() -> Collection[bytes]:
        if len(quick) < 3:
            return {b"\xaa" * 32}
        waits.cluster.has(RUN, 40, generation=5)
        return ()

    waits.cluster.absent = absent
    assert waits.begin(generation=7) == [(0, 40, 40)]


def test_restore_continues_if_holders_have_no_checkpoint(tmp_path: Path, quick: list[float]) -> None:
    """The holders died while they wrote it."""
    yard = Yard(tmp_path, 2, RUN)
    yard.machines[1].home.mkdir(parents=True)
    write_note(yard.note(1), 60, [b"\xaa" * 32], 1)
    assert yard.begin() == [(0, 0, 0), (0, 0, 0)]
    assert not quick


def test_worker_that_does_not_save_notes_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    yard = Yard(tmp_path, 1, RUN)
    yard.machines[0].home.mkdir(parents=True)

    class Third:
        rank, generation, provisional = 2, 1, False

        def machines(self) -> tuple[str, ...]:
            return "aa" * 32, "bb" * 32, ""

    saving = CheckpointManager(
        CheckpointLocations((yard.own(0, RUN),), yard.machines[0], yard.note(0)), 60.0, 2
    )
    third: Any = Third()
    state: Any = None
    saving.save(third, [0, 1, 2], state, 70)
    assert read_note(yard.note(0)) == HolderNote(70, (b"\xaa" * 32, b"\xbb" * 32), 1)
    yard.note(0).write_bytes(b"torn")
    assert read_note(yard.note(0)) == UNREADABLE
    yard.note(0).unlink()
    assert read_note(yard.note(0)) == HolderNote()


def test_damaged_note_makes_restore_wait(
    tmp_path: Path, quick: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    yard = Yard(tmp_path, 2, RUN)
    yard.machines[1].home.mkdir(parents=True)
    yard.note(1).write_bytes(b"")
    switched_on = threading.Lock()

    def absent() -> Collection[bytes]:
        with switched_on:
            if len(quick) > 5 and not yard.cluster.held:
                yard.cluster.has(RUN, 60)
        return ()

    yard.cluster.absent = absent
    assert {outcome[1] for outcome in yard.begin()} == {60}
    assert "for the machines that saved it (their note" in caplog.text


def test_damaged_note_with_local_checkpoint_does_not_wait(tmp_path: Path, quick: list[float]) -> None:
    yard = Yard(tmp_path, 2, RUN)
    yard.machines[1].home.mkdir(parents=True)
    yard.note(1).write_bytes(b"")
    save(yard.own(0, RUN), 20)
    assert yard.begin() == [(0, 20, 20), (0, 20, 0)]
    assert not quick


def test_unreachable_agent_is_asked_again(
    tmp_path: Path, quick: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    yard = Yard(tmp_path, 1, RUN)
    yard.machines[0].home.mkdir(parents=True)
    write_note(yard.note(0), 60, [b"\xaa" * 32], 1)
    yard.cluster.has(RUN, 60)

    def absent() -> Collection[bytes]:
        if len(quick) < 3:
            raise AgentError("the agent is busy")
        return ()

    yard.cluster.absent = absent
    assert yard.begin() == [(0, 60, 60)]
    assert (
        "this machine's agent, which cannot list other machines' checkpoints (the agent is busy)"
        in caplog.text
    )


def test_note_is_synced_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    target = tmp_path / "saved"
    monkeypatch.setattr(
        "barnraise.core.files.sync_path", lambda path: synced.append((path.name, target.exists()))
    )
    write_note(target, 60, [b"\xaa" * 32], 1)
    assert synced == [("saved.new", False), (tmp_path.name, True)]


def test_step_without_logged_values_has_no_entry() -> None:
    journal = MetricsLog()
    journal.start_microbatch(3, 2.0)
    journal.log({"loss": 4.0})
    journal.update([journal.of_step(3), {}], 5)
    journal.update([{}], 6)
    assert journal.history == [{"loss": 4.0}]
