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
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.repository import ROOT
from tests.unit.training.pipeline.block_model import write_base
from tests.unit.training.pipeline.split_workers import GROUPS, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(has_python_backends(torch.__version__), reason="this torch is refused"),
]


def run(act: str, room: Path, survivors: str) -> dict[str, Any]:
    """Return losses, world and steps by machine."""
    if not hasattr(os, "fork"):
        pytest.skip("the members are forked")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", ACT=act)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    words = [sys.executable, str(Path(__file__).with_name("split_workers.py")), str(room)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    results = {path.stem: json.loads(path.read_text()) for path in room.glob("?.json")}
    assert set(results) == set(survivors), done.stderr[-8000:]
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the trained weights of one process that has the whole model."""
    folder = tmp_path_factory.mktemp("alone")
    write_base(folder / "base")
    session = Session(SingleWorkerManager(), seed=0, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))
    losses = train(session, folder / "base", folder / "trained.safetensors")
    return losses, load_file(folder / "trained.safetensors")


def check_equal(room: Path, machine: str, losses: list[float], alone: Any) -> None:
    expected, weights = alone
    assert losses == pytest.approx(expected[-len(losses) :], abs=1e-6)
    trained = load_file(room / f"{machine}.safetensors")
    assert trained.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.allclose(trained[name], value, atol=1e-6), name


@pytest.mark.parametrize("act", ["two", "three"])
def test_split_equals_one_process(act: str, tmp_path: Path, alone: Any) -> None:
    results = run(act, tmp_path, GROUPS[act][0])
    for machine, (losses, _, done) in results.items():
        assert done == len(losses) == 6
        check_equal(tmp_path, machine, losses, alone)


def test_killed_stage_loses_nothing_and_a_joining_worker_gets_a_stage(tmp_path: Path, alone: Any) -> None:
    results = run("kill", tmp_path, "abd")
    for machine, (losses, world, done) in results.items():
        assert (world, done) == (3, 6)
        check_equal(tmp_path, machine, losses, alone)


def test_members_wait_for_a_machine_if_the_model_does_not_fit_on_them(tmp_path: Path, alone: Any) -> None:
    for machine, (losses, world, done) in run("wait", tmp_path, "abd").items():
        assert (world, done) == (3, 6)
        check_equal(tmp_path, machine, losses, alone)


def test_death_of_the_first_stage_loses_nothing(tmp_path: Path, alone: Any) -> None:
    for machine, (losses, _, _) in run("first", tmp_path, "ab").items():
        check_equal(tmp_path, machine, losses, alone)
