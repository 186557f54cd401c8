"""Checkpoints of split models: saved by each machine for its stage, and loaded under any other split.

The machines are threads of one process, with a disk each. The files are real.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from barnraise.checkpoint.__main__ import export
from barnraise.checkpoint.parts import PartFiles
from barnraise.core.errors import CheckpointError, WorkerRefused
from barnraise.runs.checkpoint_manifest import KEPT_IN_PARTS
from barnraise.training.pipeline.members.stage_checkpoint import PartReport
from barnraise.training.state import checkpoint_manager
from tests.unit.training.pipeline.block_model import BLOCKS
from tests.unit.training.pipeline.simulated_disks import (
    FIRST,
    SECOND,
    SIGNERS,
    SimulatedAgent,
    SimulatedDisks,
)
from tests.unit.training.pipeline.simulated_run import Fault, Kind, SimulatedRun, prepare
from tests.unit.training.pipeline.simulated_training import Expected, check, resume, script, train_until
from tests.unit.training.pipeline.test_split_loop_reports import lie

UNITS = BLOCKS + 2  # of which all are trained
WITHOUT_MIRRORS = 16000  # bytes: for two blocks with the head and their optimizer, and not for a mirror


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Return the result of full fine-tuning."""
    return Expected(tmp_path_factory.mktemp("whole"), trained=None)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Return the result of training narrow layers of the blocks."""
    return Expected(tmp_path_factory.mktemp("adapted"))


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedDisks:
    prepare(monkeypatch)
    monkeypatch.setattr(checkpoint_manager, "_POLL_S", 0.0)
    return SimulatedDisks(tmp_path / "disks")


@pytest.mark.parametrize("machines", ["abc", "a", "ab", "cab", "abcd", "bdc"])
def test_checkpoint_is_loaded_by_any_other_split(
    machines: str, disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    train_until(3, "abc", whole, disks, tmp_path)
    newest = disks.newest(FIRST)
    assert newest is not None
    assert (newest.step, newest.count) == (3, UNITS)
    run = resume(machines, whole, disks, tmp_path)
    check(run, whole, tmp_path, machines)
    assert {len(losses) for losses in run.results.values()} == {3}


def test_checkpoint_of_one_machine_is_loaded_by_several(
    disks: SimulatedDisks, tmp_path: Path, adapted: Expected
) -> None:
    train_until(3, "a", adapted, disks, tmp_path)
    run = resume("bcd", adapted, disks, tmp_path)
    check(run, adapted, tmp_path, "bcd")
    assert {source for source, _, _ in disks.sent} == {"a"}


def test_each_machine_writes_its_stage_and_its_mirrors_and_reads_no_more(
    disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    run = train_until(3, "abc", whole, disks, tmp_path)
    (checkpoint,) = (each for each in disks.find([FIRST]) if each.held.step == 3)
    held = {machine: set(parts) for machine, parts in checkpoint.holders.items()}
    assert all(0 < len(parts) < UNITS for parts in held.values()), held
    copies = {part: sum(part in parts for parts in held.values()) for part in range(UNITS)}
    assert set(copies.values()) == {2}, "the stage and its mirror"
    assert run.generations == ["abc"]
    resume("abc", whole, disks, tmp_path)
    assert disks.sent == [], "the same split needs what is on its own disk"


def test_lost_disk_with_a_mirror_loses_nothing(
    disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    train_until(3, "abc", whole, disks, tmp_path)
    disks.online = "acd"
    check(resume("acd", whole, disks, tmp_path), whole, tmp_path, "acd")


def test_checkpoint_without_all_parts_is_not_used(
    disks: SimulatedDisks, tmp_path: Path, whole: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is on one machine only, and one machine cannot finish its newest checkpoint."""
    seal = PartFiles.seal

    def refuse(self: PartFiles, info: Any, written: Any, own: Any) -> None:
        if info.step == 3 and f"{os.sep}b{os.sep}" in str(self._folder):
            raise OSError(28, "No space left on device")
        seal(self, info, written, own)

    monkeypatch.setattr(PartFiles, "seal", refuse)
    train_until(3, "abc", whole, disks, tmp_path, copies=1)
    steps = {each.held.step for each in disks.find([FIRST], incomplete=True)}
    assert 3 in steps, "the others have signed theirs"
    newest = disks.newest(FIRST)
    assert newest is not None
    assert newest.step == 2
    run = resume("ab", whole, disks, tmp_path)
    check(run, whole, tmp_path, "ab")
    assert {len(losses) for losses in run.results.values()} == {4}


def gathers_of_later_steps(run: SimulatedRun, machine: str) -> list[int]:
    """Return the all-gathers of a worker after its first checkpoint: votes, and two for each checkpoint."""
    performed = [each.what for each in run.operations[machine]]
    gathers = [place for place, what in enumerate(performed) if what.startswith("all-gather")]
    start = gathers.index(performed.index("all-gather of 0 bytes"))
    return gathers[start + 5 :]  # the turn, the vote and two of the checkpoint are those of the first step


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["die", "die-after"])
@pytest.mark.parametrize("copies", [1, 2])
def test_death_at_any_operation_leaves_a_complete_checkpoint(
    copies: int, kind: Kind, disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    """Machine b dies, then all. With copies, the run goes on without its disk."""
    machines = "abc" if copies == 1 else "ac"
    once = train_until(3, "abc", whole, disks, tmp_path, copies=copies)
    for operation in gathers_of_later_steps(once, "b"):
        again = SimulatedDisks(tmp_path / f"disks-{operation}")
        faults = [Fault("b", operation, kind)]
        train_until(3, "abc", whole, again, tmp_path, copies=copies, faults=faults)
        again.online = machines
        newest = again.newest(FIRST)
        assert newest is not None
        run = resume(machines, whole, again, tmp_path)
        check(run, whole, tmp_path, machines)
        assert {len(losses) for losses in run.results.values()} == {6 - newest.step}


def test_old_checkpoints_are_removed_when_a_newer_one_is_complete(
    disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    train_until(5, "abc", whole, disks, tmp_path)
    for machine in "abc":
        steps = sorted(each.step for each in disks.local(machine).held(FIRST, SIGNERS))
        assert steps == list(range(6 - KEPT_IN_PARTS, 6))
    folder = disks.local("a").folder(FIRST)
    assert not list(folder.glob(".draft-*"))


def test_size_of_a_checkpoint_is_that_of_what_is_trained(
    disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    train_until(3, "abc", whole, disks, tmp_path, copies=1)
    parts = [path for path in disks.files(FIRST) if path.parent.name == "step-00000003"]
    assert len(parts) == UNITS
    counted = 0
    for path in parts:
        tensors = load_file(path)
        counted += sum(tensor.numel() for tensor in tensors.values() if tensor.dim())
    trained = sum(value.numel() for value in whole.weights.values())
    assert counted == 3 * trained, "values, and both moments of Adam"


def test_damaged_part_is_read_from_another_machine_or_the_checkpoint_is_passed_over(
    disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    train_until(3, "abc", whole, disks, tmp_path)
    copies = [path for path in disks.files(FIRST) if path.parent.name == "step-00000003"]
    chosen = [path for path in copies if path.name == "part-0003.safetensors"]
    assert len(chosen) == 2
    damage(chosen[0])
    run = resume("abc", whole, disks, tmp_path, "train-third")
    check(run, whole, tmp_path, "abc")
    assert {len(losses) for losses in run.results.values()} == {3}
    for path in disks.files(FIRST):
        if (path.parent.name, path.name) == ("step-00000003", "part-0003.safetensors"):
            damage(path)
    run = resume("abc", whole, disks, tmp_path)
    check(run, whole, tmp_path, "abc")
    assert {len(losses) for losses in run.results.values()} == {4}, "from step 2"


def test_run_does_not_start_at_step_0_if_no_checkpoint_can_be_read(
    disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    """Its new checkpoints would replace those that may be read again when another machine is on."""
    train_until(3, "abc", whole, disks, tmp_path)
    for path in disks.files(FIRST):
        if path.name == "part-0003.safetensors":
            damage(path)
    with pytest.raises(AssertionError) as caught:
        resume("abc", whole, disks, tmp_path)
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert "no checkpoint can be read" in caught.value.__cause__.message


def test_member_whose_report_about_a_checkpoint_cannot_be_read_is_refused_alone(
    disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    lies = {"c": lie(PartReport, "previous", "no digest")}
    checkpoints = disks.managers(FIRST)
    run = SimulatedRun("abc", script(whole, tmp_path), checkpoints=checkpoints, lies=lies)
    run.run()
    check(run, whole, tmp_path, "ab")
    assert isinstance(run.ends["c"], WorkerRefused)


def damage(path: Path) -> None:
    """Change a byte of a file, which may be shared with other copies."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("without", ["c", "bc", "a"])
def test_machines_without_a_disk_have_their_parts_written_and_read_by_others(
    without: str, disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    """As a guest's machine, whose workers are in a sandbox."""
    train_until(3, "abc", whole, disks, tmp_path, without=without)
    newest = disks.newest(FIRST)
    assert newest is not None
    assert (newest.step, newest.count) == (3, UNITS)
    run = resume("abc", whole, disks, tmp_path, without=without)
    check(run, whole, tmp_path, "abc")
    assert {len(losses) for losses in run.results.values()} == {3}


def test_workers_of_one_machine_write_one_checkpoint(
    disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    train_until(3, "aAb", whole, disks, tmp_path, places={"A": "a"})
    newest = disks.newest(FIRST)
    assert newest is not None
    assert newest.step == 3
    assert disks.machines == {"a", "b"}
    run = resume("ab", whole, disks, tmp_path)
    check(run, whole, tmp_path, "ab")


def test_missing_mirror_is_said_with_what_a_death_costs(
    disks: SimulatedDisks, tmp_path: Path, whole: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    memory = dict.fromkeys("abc", WITHOUT_MIRRORS)
    train_until(3, "abc", whole, disks, tmp_path, memory=memory)
    assert "training goes back to the newest checkpoint" in caplog.text
    check(resume("abc", whole, disks, tmp_path), whole, tmp_path, "abc")


@pytest.mark.parametrize("machines", ["a", "abc"])
def test_export_writes_the_whole_model_from_parts(
    machines: str, disks: SimulatedDisks, tmp_path: Path, whole: Expected
) -> None:
    """It is that of the last step: nothing kills the workers before."""
    run = resume(machines, whole, disks, tmp_path)
    check(run, whole, tmp_path, machines)
    newest = disks.newest(SECOND)
    assert newest is not None
    agent = SimulatedAgent(disks, "z", SECOND, ())
    disks.machines.add("z")
    agent.fetch(SECOND, newest.step, range(UNITS))
    facts = export(disks.local("z").folder(SECOND), SECOND, tmp_path / "exported", agent)
    assert facts["steps"] == newest.step == 6
    assert "base_tensors" not in facts, "nothing is frozen"
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == whole.weights.keys()
    for name, value in whole.weights.items():
        assert torch.allclose(exported[name], value, atol=1e-6), name


def test_export_of_trained_layers_says_that_the_base_is_not_in_it(
    disks: SimulatedDisks, tmp_path: Path, adapted: Expected
) -> None:
    train_until(3, "a", adapted, disks, tmp_path)
    agent = SimulatedAgent(disks, "a", FIRST, ())
    folder = disks.local("a").folder(FIRST)
    facts = export(folder, FIRST, tmp_path / "exported", agent)
    assert facts["base_tensors"] is None
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == adapted.weights.keys()
    shutil.rmtree(folder / "step-00000003")
    assert export(folder, FIRST, tmp_path / "exported", agent)["steps"] == 2
