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
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
    "numpy": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: numpy.cos(step / 20)),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=4, cycle_momentum=False
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [4],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
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
    source, target = Trained(SCHEDULERS[name]), Trained(SCHEDULERS[name])
    source.train(7)
    parts = source.state.flatten(7)
    assert target.state.load(FlatState(parts.skeleton, [tensor.clone() for tensor in parts.tensors])) == 7
    assert target.train(6) == source.train(6)
    assert all(
        torch.equal(a, b) for a, b in zip(source.net.parameters(), target.net.parameters(), strict=True)
    )


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
    assert sum(digest != state.window_digest(step) for step, digest in enumerate(windows)) == 1
    assert any(sketch != state.fingerprint(step, is_full=False) for step, sketch in enumerate(sketches))
    assert sketches[0] == state.fingerprint(0, is_full=False)
