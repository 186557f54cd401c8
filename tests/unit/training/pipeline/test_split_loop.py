"""Split models on real processes, against one process and against a plain loop of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from barnraise.collectives.torch_patch.torch_version import has_python_backends
from barnraise.history.columns import unpack_column
from barnraise.history.entries import StepBatch, ValueBatch
from barnraise.history.log_format import decode_frames
from barnraise.history.merge import merge
from barnraise.history.view_builder import build_view
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.repository import ROOT
from tests.unit.training.pipeline.block_model import WIDTH, write_base
from tests.unit.training.pipeline.split_workers import DIES_AT, GROUPS, WAITS_AT, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(has_python_backends(torch.__version__), reason="this torch is refused"),
]


def run(act: str, room: Path, survivors: str) -> dict[str, Any]:
    """Return losses, world and steps by machine."""
    return run_act(act, room, survivors)[0]


def run_act(act: str, room: Path, survivors: str) -> tuple[dict[str, Any], str]:
    """Return losses, world and steps by machine, and what the processes have printed."""
    if not hasattr(os, "fork"):
        pytest.skip("the members are forked")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", ACT=act)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    words = [sys.executable, str(Path(__file__).with_name("split_workers.py")), str(room)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    results = {path.stem: json.loads(path.read_text()) for path in room.glob("?.json")}
    assert set(results) == set(survivors), done.stderr[-8000:]
    return results, done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the trained weights of one process that has the whole model."""
    folder = tmp_path_factory.mktemp("alone")
    write_base(folder / "base")
    session = Session(SingleWorkerManager(), seed=0, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))
    losses = train(session, folder / "base", folder / "trained.safetensors")
    return losses, load_file(folder / "trained.safetensors")


def check_equal(room: Path, machine: str, losses: list[float], alone: Any, tolerance: float = 1e-6) -> None:
    expected, weights = alone
    assert losses == pytest.approx(expected[-len(losses) :], abs=tolerance)
    trained = load_file(room / f"{machine}.safetensors")
    assert trained.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.allclose(trained[name], value, atol=tolerance), name


@pytest.mark.parametrize("act", ["two", "three"])
def test_split_equals_one_process(act: str, tmp_path: Path, alone: Any) -> None:
    results = run(act, tmp_path, GROUPS[act][0])
    for machine, (losses, _, done, _) in results.items():
        assert done == len(losses) == 6
        check_equal(tmp_path, machine, losses, alone)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the results of a training in which c is killed and d joins."""
    room = tmp_path_factory.mktemp("killed")
    return room, run("kill", room, "abd")


def test_killed_stage_loses_nothing_and_a_joining_worker_gets_a_stage(killed: Any, alone: Any) -> None:
    room, results = killed
    for machine, (losses, world, done, _) in results.items():
        assert (world, done) == (3, 6)
        check_equal(room, machine, losses, alone)


def test_record_has_each_step_once_through_deaths(killed: Any, alone: Any) -> None:
    room, _ = killed
    logs = {path.stem: decode_frames(path.read_bytes()).entries for path in room.glob("?.log")}
    assert set("abd") <= set(logs)
    for entries in (merge(logs.values()), merge([logs["a"]])):
        steps = [entry for entry in entries if isinstance(entry, StepBatch)]
        assert [step for batch in steps for step in range(batch.first, batch.end)] == list(range(6))
        assert [samples for batch in steps for samples in batch.samples] == [8] * 6
        values = [entry for entry in entries if isinstance(entry, ValueBatch)]
        losses = [value for batch in values for value in unpack_column(batch.columns[0])]
        assert losses == pytest.approx(alone[0], abs=1e-6)
    view = build_view(merge(logs.values()))
    assert view.machines[0].name
    assert {"compute", "communication", "vote", "activations"} <= {
        phase.name for phase in view.phases if phase.measured_s
    }
    assert [plan.name for plan in view.plans] == [f"split over {count} workers" for count in (3, 2, 3)]
    assert [plan.step for plan in view.plans[:2]] == [0, DIES_AT]
    assert view.plans[2].step >= WAITS_AT
    shares = {machine.node: machine.share for machine in view.machines}
    assert sum(filter(None, shares.values())) == pytest.approx(1.0)


def test_metrics_count_steps_activations_and_moved_state(killed: Any) -> None:
    room, results = killed
    counted = {machine: json.loads((room / f"metrics-{machine}").read_text()) for machine in "abd"}
    for machine, (losses, *_) in results.items():
        assert counted[machine]["barnraise_steps_total"] == len(losses)
        assert counted[machine]["barnraise_samples_total"] == 8 * len(losses)
    assert all(counted[machine]["barnraise_activation_sent_bytes_total"] > 0 for machine in "abd")
    block = 3 * 4 * 4 * WIDTH + 2 * 4  # values and moments of both trained layers, and two counts of steps
    moved = [counted[machine].get("barnraise_moved_state_bytes_total", 0) for machine in "abd"]
    assert moved[2] > 0, "d has joined"
    assert all(size % block == 0 for size in moved), moved


def test_members_wait_for_a_machine_if_the_model_does_not_fit_on_them(tmp_path: Path, alone: Any) -> None:
    for machine, (losses, world, done, _) in run("wait", tmp_path, "abd").items():
        assert (world, done) == (3, 6)
        check_equal(tmp_path, machine, losses, alone)


def test_death_of_the_first_stage_loses_nothing(tmp_path: Path, alone: Any) -> None:
    for machine, (losses, *_) in run("first", tmp_path, "ab").items():
        check_equal(tmp_path, machine, losses, alone)


def test_stages_follow_memory_and_a_machine_without_blocks_takes_part(tmp_path: Path, alone: Any) -> None:
    """Machine a has no memory for the embeddings or the head, and d for no block at all."""
    results = run("order", tmp_path, "abcd")
    for machine, (losses, _, done, runs) in results.items():
        assert done == len(losses) == 6
        check_equal(tmp_path, machine, losses, alone)
        assert runs == [[2, 3], [0, 2], [3, 5], None]


def test_full_replica_beside_a_pipeline_equals_one_process(tmp_path: Path, alone: Any) -> None:
    results = run("replica", tmp_path, "abcd")
    for machine, (losses, _, done, runs) in results.items():
        assert done == len(losses) == 6
        check_equal(tmp_path, machine, losses, alone, 1e-5)
        assert runs[0] == [0, 5]
        assert sorted(runs[1:])[0][0] == 0
        assert sorted(runs[1:])[-1][1] == 5


def test_worker_with_another_model_is_refused_alone(tmp_path: Path, alone: Any) -> None:
    """It reads the reason, and the others go on in the same step."""
    results, output = run_act("refuse", tmp_path, "ab")
    for machine, (losses, world, done, _) in results.items():
        assert (world, done) == (2, 6)
        check_equal(tmp_path, machine, losses, alone)
    assert "[worker-refused]" in output
    assert "it trains 48 numbers, and" in output
