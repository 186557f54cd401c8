"""Gradients given to the optimizer equal those of a plain loop, also if a parameter has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from barnraise.checkpoint.serialization import FlatState
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.threaded_group import ThreadWorker, run_workers

SAMPLES, BATCH = 24, 6
STEPS = SAMPLES // BATCH
NETS = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 1), "second": torch.nn.Linear(3, 1)}).double()
IMAGES = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 1)).double()

Loss = Callable[[torch.nn.Module, int, torch.Tensor], torch.Tensor]


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(1)).double()


def _session(manager: Any) -> Session:
    return Session(manager, seed=3, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))


def _optimizer(net: torch.nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1, **options)


def _train(manager: Any, net: torch.nn.Module, rows: torch.Tensor, loss: Loss, **options: Any) -> Session:
    run, optimizer = _session(manager), _optimizer(net, **options)
    _, _, batches = run.prepare(net, optimizer, DataLoader(TensorDataset(rows), batch_size=BATCH))
    for batch in batches:
        for (x,) in batch:
            loss(net, run.done, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


def _plain(net: torch.nn.Module, rows: torch.Tensor, loss: Loss, **options: Any) -> list[torch.Tensor]:
    optimizer = _optimizer(net, **options)
    for step in range(STEPS):
        loss(net, step, rows[step * BATCH : (step + 1) * BATCH]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _state(net)


def _state(net: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def _seldom(net: torch.nn.Module, step: int, x: torch.Tensor) -> torch.Tensor:
    """Return a loss that uses the second net only in the second step."""
    assert isinstance(net, torch.nn.ModuleDict)
    used = ["first", "second"] if step == 1 else ["first"]
    return sum((net[name](x) - 1).square().mean() for name in used)  # type: ignore[return-value]


def test_parameter_without_gradient_is_not_moved() -> None:
    """Neither weight decay nor momentum moves such a parameter."""
    rows = _rows(3)
    expected = _plain(copy.deepcopy(NETS), rows, _seldom)

    def train(manager: Any) -> list[torch.Tensor]:
        net = copy.deepcopy(NETS)
        _train(manager, net, rows, _seldom)
        return _state(net)

    for trained in [train(SingleWorkerManager()), *run_workers(2, train)]:
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-12)


def test_gradient_of_one_worker_counts_for_all() -> None:
    """Only one micro-batch of a step, and so only one worker, uses the second net."""
    rows = _rows(3)
    rows[:, 0] = 0.0
    rows[::BATCH, 0] = 1.0

    def once(net: torch.nn.Module, step: int, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(net, torch.nn.ModuleDict)
        used = ["first", "second"] if float(x[:, 0].max()) else ["first"]
        return sum((x[:, :1] * net[name](x) + net[name](x).square()).mean() for name in used)  # type: ignore[return-value]

    def train(worker: ThreadWorker) -> list[torch.Tensor]:
        net = copy.deepcopy(NETS)
        _train(worker, net, rows, once)
        return _state(net)

    alone = copy.deepcopy(NETS)
    _train(SingleWorkerManager(), alone, rows, once)
    for trained in run_workers(2, train):
        torch.testing.assert_close(trained, _state(alone), rtol=0, atol=1e-12)
        assert not torch.equal(trained[2], NETS["second"].weight)  # type: ignore[arg-type]


def test_parameter_frozen_later_stays_and_can_be_unfrozen() -> None:
    net, rows = copy.deepcopy(NETS), _rows(3)
    seen: list[torch.Tensor] = []

    def loss(net: torch.nn.Module, step: int, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(net, torch.nn.ModuleDict)
        net["second"].requires_grad_(step != 2)
        if x is not None and len(seen) == step:
            seen.append(net["second"].weight.detach().clone())  # type: ignore[union-attr,operator]
        return sum((module(x) - 1).square().mean() for module in net.values())  # type: ignore[return-value]

    _train(SingleWorkerManager(), net, rows, loss)
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[3]), "frozen in the third step"
    assert not torch.equal(seen[3], net["second"].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_layout_matches_parameter(fused: bool) -> None:
    """Fused optimizers read memory in order, without strides."""
    rows = _rows(3, 4, 4).to(memory_format=torch.channels_last)

    def loss(net: torch.nn.Module, step: int, x: torch.Tensor) -> torch.Tensor:
        return (net(x) - 1).square().mean()  # type: ignore[no-any-return]

    def net() -> torch.nn.Module:
        return copy.deepcopy(IMAGES).to(memory_format=torch.channels_last)

    expected = _plain(net(), rows, loss, fused=fused)
    ours = net()
    run = _train(SingleWorkerManager(), ours, rows, loss, fused=fused)
    torch.testing.assert_close(_state(ours), expected, rtol=0, atol=1e-12)

    parts = run._state.flatten(run.done)
    joining, other = _session(SingleWorkerManager()), net()
    optimizer = _optimizer(other, fused=fused)
    joining.prepare(other, optimizer, DataLoader(TensorDataset(rows), batch_size=BATCH))
    joining._state.load(FlatState(parts.skeleton, [tensor.clone().contiguous() for tensor in parts.tensors]))
    for parameter, kept in optimizer.state.items():
        assert kept["exp_avg"].stride() == parameter.stride()
    assert joining._state.flatten(run.done).skeleton == parts.skeleton
