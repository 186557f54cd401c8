"""Training of simulated runs, and its result in one process that has the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.pipeline.block_model import BLOCKS, write_base
from tests.unit.training.pipeline.simulated_disks import FIRST, SECOND, SimulatedDisks
from tests.unit.training.pipeline.simulated_run import Killed, Script, SimulatedManager, SimulatedRun, bind
from tests.unit.training.pipeline.split_workers import train


class Expected:
    """Losses and weights of one process that has the whole model. ``trained``: None for all of it."""

    def __init__(self, folder: Path, trained: Sequence[int] | None = range(BLOCKS)) -> None:
        self.base, self.trained = folder / "base", trained
        write_base(self.base, trained)
        session = Session(SingleWorkerManager(), seed=0, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))
        self.losses = train(session, self.base, folder / "trained.safetensors", trained=trained)
        self.weights = load_file(folder / "trained.safetensors")


def script(
    expected: Expected, folder: Path, after_step: Callable[[Session], None] = lambda run: None
) -> Script:
    """Return a script that trains and saves, as `split_workers` does."""

    def main(session: Session, manager: SimulatedManager) -> list[float]:
        bind(manager)

        def note() -> None:
            manager.run.note_step(session.done)
            after_step(session)

        return train(
            session,
            expected.base,
            folder / f"{manager.machine}.safetensors",
            trained=expected.trained,
            after_step=note,
        )

    return main


def check(
    run: SimulatedRun, expected: Expected, folder: Path, survivors: str, tolerance: float = 1e-6
) -> None:
    assert set(run.results) == set(survivors), (run.generations, run.ends)
    for machine, losses in run.results.items():
        assert losses == pytest.approx(expected.losses[-len(losses) :], abs=tolerance), machine
        saved = load_file(folder / f"{machine}.safetensors")
        assert saved.keys() == expected.weights.keys()
        for name, value in expected.weights.items():
            assert torch.allclose(saved[name], value, atol=tolerance), (machine, name)


def train_until(
    step: int, machines: str, expected: Expected, disks: SimulatedDisks, folder: Path, **more: Any
) -> SimulatedRun:
    """Train with a checkpoint after every step, and kill all workers after this one."""

    def die(session: Session) -> None:
        if session.done == step:
            raise Killed

    copies, without = more.pop("copies", 2), more.pop("without", "")
    checkpoints = disks.managers(FIRST, copies=copies, without=without)
    run = SimulatedRun(machines, script(expected, folder, die), checkpoints=checkpoints, **more)
    run.run()
    assert not run.results
    return run


def resume(
    machines: str, expected: Expected, disks: SimulatedDisks, folder: Path, run: str = SECOND, **more: Any
) -> SimulatedRun:
    """Train on from the newest checkpoint, in another run."""
    checkpoints = disks.managers(run, FIRST, without=more.pop("without", ""))
    resumed = SimulatedRun(machines, script(expected, folder), checkpoints=checkpoints, **more)
    resumed.run()
    return resumed
