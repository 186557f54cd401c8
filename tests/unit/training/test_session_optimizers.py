"""Several optimizers with separate losses: each uses the gradients of its own step()."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from barnraise.core.errors import RunError
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.threaded_group import ThreadWorker, run_workers

SAMPLES, BATCH = 48, 12
GENERATOR, DISCRIMINATOR = "generator", "discriminator"


NETS = torch.nn.ModuleDict({GENERATOR: torch.nn.Linear(2, 3), DISCRIMINATOR: torch.nn.Linear(3, 1)}).double()


def _rows() -> TensorDataset:
    stream = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 3, generator=stream).double(), torch.randn(SAMPLES, 2, generator=stream).double()
    )


class Gan:
    def __init__(self) -> None:
        self.nets = copy.deepcopy(NETS)
        self.optimizers: dict[str, Any] = {
            name: torch.optim.AdamW(self.nets[name].parameters(), lr=0.05) for name in self.nets
        }

    def loss(self, name: str, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return a loss that leaves gradients on both nets."""
        fake, judge = self.nets[GENERATOR](noise), self.nets[DISCRIMINATOR]
        if name == GENERATOR:
            return torch.nn.functional.softplus(-judge(fake)).mean()
        return (torch.nn.functional.softplus(judge(fake)) + torch.nn.functional.softplus(-judge(real))).mean()

    def state(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.nets.parameters()]


def _plain(epochs: int) -> list[torch.Tensor]:
    """Run the plain loop, with both steps after both losses, as a commit does."""
    gan = Gan()
    x, z = _rows().tensors
    for _ in range(epochs):
        for first in range(0, SAMPLES, BATCH):
            kept = []
            for name in gan.nets:
                gan.nets.zero_grad()
                gan.loss(name, x[first : first + BATCH], z[first : first + BATCH]).backward()
                kept += [(parameter, parameter.grad) for parameter in gan.nets[name].parameters()]
            for parameter, gradient in kept:
                parameter.grad = gradient
            for optimizer in gan.optimizers.values():
                optimizer.step()
    return gan.state()


def _session(manager: Any) -> Session:
    return Session(manager, seed=3, unit=4, checkpoints=CheckpointManager(None, 60.0, 1))


def _train(manager: Any, order: list[str], epochs: int = 2) -> list[torch.Tensor]:
    gan, run = Gan(), _session(manager)
    _, _, batches = run.prepare(
        gan.nets, [gan.optimizers[name] for name in order], DataLoader(_rows(), batch_size=BATCH)
    )
    for _ in run.epochs(epochs):
        for batch in batches:
            for real, noise in batch:
                for name in order:
                    gan.optimizers[name].zero_grad()
                    gan.loss(name, real, noise).backward()
                    gan.optimizers[name].step()
    return gan.state()


@pytest.mark.parametrize("order", [[DISCRIMINATOR, GENERATOR], [GENERATOR, DISCRIMINATOR]])
def test_alternating_optimizers_match_plain_loop(order: list[str]) -> None:
    expected = _plain(2)
    for trained in [
        _train(SingleWorkerManager(), order),
        *run_workers(2, lambda worker: _train(worker, order)),
    ]:
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-12)


def test_gradient_dropped_after_sending_does_not_count() -> None:
    """The script calls zero_grad() between backward() and step(), also in the last micro-batch of a step."""
    x, z = _rows().tensors

    def train(worker: ThreadWorker) -> list[torch.Tensor]:
        gan, run = Gan(), _session(worker)
        optimizer = torch.optim.SGD(gan.nets.parameters(), lr=0.05)
        _, _, batches = run.prepare(gan.nets, optimizer, DataLoader(_rows(), batch_size=BATCH))
        for batch in batches:
            for real, noise in batch:
                gan.loss(DISCRIMINATOR, real, noise).backward()
                gan.nets[GENERATOR].zero_grad()
                optimizer.step()
        return gan.state()

    gan = Gan()
    optimizer = torch.optim.SGD(gan.nets[DISCRIMINATOR].parameters(), lr=0.05)
    for first in range(0, SAMPLES, BATCH):
        gan.nets.zero_grad()
        gan.loss(DISCRIMINATOR, x[first : first + BATCH], z[first : first + BATCH]).backward()
        optimizer.step()
    for trained in run_workers(2, train):
        torch.testing.assert_close(trained, gan.state(), rtol=0, atol=1e-12)


def test_optimizers_step_once_per_batch() -> None:
    gan, run = Gan(), _session(SingleWorkerManager())
    first, second = gan.optimizers.values()
    with pytest.raises(RunError, match="without a batch"):
        run.prepare(gan.nets, [first, second], DataLoader(_rows(), batch_size=BATCH)) and first.step()
    batches = iter(run.microbatches(0, 1))
    next(batches)
    first.step()
    with pytest.raises(RunError, match="twice for a batch") as caught:
        first.step()
    assert "once for each batch" in caught.value.hint
    with pytest.raises(RunError, match="with a closure"):
        second.step(lambda: 0.0)
    with pytest.raises(RunError, match="of 1 of the optimizers"):
        next(batches)
