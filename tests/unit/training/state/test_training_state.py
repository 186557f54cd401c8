"""Training state: flattened and loaded, on a joining worker and from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

from barnraise.checkpoint.serialization import FlatState
from barnraise.training.state.training_state import TrainingState

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / 10)),
    "numpy": lambda one: lr_scheduler.LambdaLR(one, lambda step: numpy.cos(step / 20)),
    "multiplicative": lambda one: lr_scheduler.MultiplicativeLR(one, lambda step: 0.9),
    "step": lambda one: lr_scheduler.StepLR(one, 3, 0.5),
    "one cycle": lambda one: lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=30),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 20),
    "restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 5),
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.1, step_size_up=4, cycle_momentum=False),
    "sequential": lambda one: lr_scheduler.SequentialLR(
        one,
        [lr_scheduler.LambdaLR(one, lambda step: (step + 1) / 4), lr_scheduler.ExponentialLR(one, 0.9)],
        [4],
    ),
    "chained": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LambdaLR(one, lambda step: 1 / (step + 1)), lr_scheduler.ExponentialLR(one, 0.9)]
    ),
}


class Trained:
    def __init__(self, make: Make) -> None:
        self.net = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.scheduler = make(self.optimizer)
        self.state = TrainingState(self.net, [self.optimizer], [self.scheduler], {})

    def train(self, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            self.net(torch.ones(1, 3)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            rates.append(float(self.optimizer.param_groups[0]["lr"]))
        return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_loaded_state_keeps_learning_rates(name: str) -> None:
    one, other = Trained(SCHEDULERS[name]), Trained(SCHEDULERS[name])
    one.train(7)
    parts = one.state.flatten(7)
    assert other.state.load(FlatState(parts.skeleton, [tensor.clone() for tensor in parts.tensors])) == 7
    assert other.train(6) == one.train(6)
    assert all(torch.equal(a, b) for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True))


class Average:
    """Exponential moving average of a model, as a tracked object."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(100_000)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}


def test_fingerprint_covers_tracked_objects() -> None:
    net, average = torch.nn.Linear(3, 2), Average()
    state = TrainingState(net, [torch.optim.SGD(net.parameters(), lr=1.0)], [], {"mean": average})
    before = state.fingerprint(7, is_full=False)
    assert state.fingerprint(7, is_full=False) == before
    average.numbers[-1] += 1
    assert state.fingerprint(7, is_full=False) != before


def test_window_digest_covers_whole_model_over_steps() -> None:
    net = torch.nn.Linear(200_000, 1)
    state = TrainingState(net, [torch.optim.SGD(net.parameters(), lr=1.0)], [], {})
    windows = [state.window_digest(step) for step in range(8)]
    sketches = [state.fingerprint(step, is_full=False) for step in range(16)]
    with torch.no_grad():
        net.weight[0, -1] += 1.0
    assert sum(one != state.window_digest(step) for step, one in enumerate(windows)) == 1
    assert any(one != state.fingerprint(step, is_full=False) for step, one in enumerate(sketches))
    assert sketches[0] == state.fingerprint(0, is_full=False)
