"""Faults of a split model at each operation of a machine, simulated in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.pipeline.block_model import write_base
from tests.unit.training.pipeline.simulated_run import (
    Fault,
    SimulatedManager,
    SimulatedRun,
    bind,
    prepare,
)
from tests.unit.training.pipeline.split_workers import train

STEP = 20  # an operation of the first worker in the second step


class Expected:
    """Losses and weights of one process that has the whole model."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "base"
        write_base(self.base)
        session = Session(SingleWorkerManager(), seed=0, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))
        self.losses = train(session, self.base, folder / "trained.safetensors")
        self.weights = load_file(folder / "trained.safetensors")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(tmp_path_factory.mktemp("alone"))


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


def script(expected: Expected, folder: Path) -> Callable[[Session, SimulatedManager], list[float]]:
    """Return a script that trains and saves, as `split_workers` does."""

    def main(session: Session, manager: SimulatedManager) -> list[float]:
        bind(manager)
        session.on_commit = lambda callback: None  # type: ignore[method-assign]
        return train(session, expected.base, folder / f"{manager.machine}.safetensors")

    return main


def check(run: SimulatedRun, expected: Expected, folder: Path, survivors: str) -> None:
    assert set(run.results) == set(survivors), (run.generations, run.ends)
    for machine, losses in run.results.items():
        assert losses == pytest.approx(expected.losses[-len(losses) :], abs=1e-6), machine
        saved = load_file(folder / f"{machine}.safetensors")
        assert saved.keys() == expected.weights.keys()
        for name, value in expected.weights.items():
            assert torch.allclose(saved[name], value, atol=1e-6), (machine, name)


def test_threads_train_as_one_process(tmp_path: Path, expected: Expected) -> None:
    run = SimulatedRun("abc", script(expected, tmp_path))
    run.run()
    check(run, expected, tmp_path, "abc")


def test_machine_with_two_workers_is_mirrored_elsewhere(tmp_path: Path, expected: Expected) -> None:
    """Machine a has the workers a and A; with it, two neighbours of the pipeline are lost at once."""
    run = SimulatedRun(
        "aAbc", script(expected, tmp_path), places={"A": "a"}, faults=[Fault("a", STEP, "die")]
    )
    run.run()
    check(run, expected, tmp_path, "bc")
    assert run.generations == ["aAbc", "bc"]
