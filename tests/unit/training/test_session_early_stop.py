"""Leaving the loop over batches: the model is the last committed one, and training can resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.recovery.out_of_memory import OutOfMemoryGuard
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.steps.throughput import Throughput
from tests.unit.training.flat_loop import microbatches
from tests.unit.training.threaded_group import ThreadWorker, run_workers

SAMPLES, BATCH, UNIT = 48, 12, 4


def _rows() -> TensorDataset:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


NET = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()


class Script:
    """Ordinary training; ``stop``: committed steps after which it breaks out of the loop."""

    def __init__(self, manager: Any, parts: int = 1) -> None:
        self.run = Session(manager, seed=3, unit=UNIT, checkpoints=CheckpointManager(None, 60.0, 1))
        self.run._oom_guard = OutOfMemoryGuard(None)
        self.run._oom_guard.parts = parts
        self.net = copy.deepcopy(NET)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        loader = DataLoader(_rows(), batch_size=BATCH)
        _, self.optimizer, self.batches = self.run.prepare(self.net, optimizer, loader)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        torch.nn.functional.mse_loss(self.net(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, stop: int | None = None, epochs: int = 1) -> Script:
        for _ in self.run.epochs(epochs):
            for x, y in microbatches(self.batches):
                if self.run.done == stop:
                    return self
                self.step(x, y)
        return self


def _state(script: Script) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in script.net.state_dict().values()]


def _same(state: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for tensor, expected_tensor in zip(state, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=0, atol=1e-12)


def test_batch_norm_stats_are_committed_ones(tmp_path: Path) -> None:
    committed: list[torch.Tensor] = []
    script = Script(SingleWorkerManager())
    script.run.on_commit(lambda run: committed.__setitem__(slice(None), _state(script)))
    script.train(stop=2)
    assert script.run.done == 2
    assert all(
        torch.equal(tensor, committed_tensor)
        for tensor, committed_tensor in zip(_state(script), committed, strict=True)
    )
    assert script.net[0].momentum == 0.1
    script.run.save(tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["0.running_var"], committed[3])
    assert float(saved["0.running_var"].min()) > 0


def test_save_within_microbatch_writes_committed_state(tmp_path: Path) -> None:
    script = Script(SingleWorkerManager())
    for x, y in microbatches(script.batches):
        script.run.save(tmp_path / "model.safetensors")
        digest = script.run.state_digest()
        held = _state(script)
        script.run.state_digest()
        assert all(
            torch.equal(tensor, earlier_tensor)
            for tensor, earlier_tensor in zip(_state(script), held, strict=True)
        )
        script.step(x, y)
        if script.run.done == 0:
            assert script.run.state_digest() == digest
    assert float(load_file(tmp_path / "model.safetensors")["0.running_var"].min()) > 0
    _same(_state(script), _state(Script(SingleWorkerManager()).train()))


@pytest.mark.parametrize("place", ["before backward", "after backward", "after step"])
@pytest.mark.parametrize("parts", [1, 2])
def test_second_pass_resumes_after_break(place: str, parts: int) -> None:
    """Also in the middle of a step, every sample counts once."""
    script = Script(SingleWorkerManager(), parts)
    for number, (x, y) in enumerate(microbatches(script.batches), 1):
        if number == 3 * parts + 2 and place == "before backward":
            break
        if number == 3 * parts + 2 and place == "after backward":
            torch.nn.functional.mse_loss(script.net(x), y).backward()
            break
        script.step(x, y)
        if number == 3 * parts + 2:
            break
    assert script.run.done == 1
    script.train(epochs=1)
    assert script.run.done == SAMPLES // BATCH
    whole = Script(SingleWorkerManager(), parts).train()
    if parts == 1:
        _same(_state(script), _state(whole))
    seen = script.net[0].num_batches_tracked
    assert int(seen) == SAMPLES // UNIT  # type: ignore[arg-type]


def test_error_in_loop_leaves_committed_state() -> None:
    script = Script(SingleWorkerManager())

    def fail() -> None:
        for x, _ in microbatches(script.batches):
            script.net(x)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    _same(_state(script), _state(Script(SingleWorkerManager())))


def test_all_workers_stop_at_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They can still gather. Both have micro-batches in every step, else they would not be in the loop."""
    monkeypatch.setattr(Throughput, "update", lambda *_: None)
    expected = _state(Script(SingleWorkerManager()).train(stop=2))

    def member(worker: ThreadWorker) -> tuple[int, list[torch.Tensor], torch.Tensor]:
        script = Script(worker).train(stop=2)
        return script.run.done, _state(script), script.run.gather(torch.tensor([float(worker.rank)]))

    for done, state, gathered in run_workers(2, member):
        assert done == 2
        _same(state, expected)
        assert gathered.tolist() == [0.0, 1.0]
