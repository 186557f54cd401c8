"""Autocast in different dtypes on each worker: one scale, one gradient, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.threaded_group import run_workers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def train(manager: Any, dtype: torch.dtype) -> tuple[list[torch.Tensor], float]:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(96, 8, generator=stream)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=16)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=stream) / 4)
    run = Session(manager, seed=3, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, batches, scaler = run.prepare(net, optimizer, loader, scaler)
    for _ in run.epochs(4):
        for batch in batches:
            for inputs, targets in batch:
                with torch.autocast("cpu", dtype=dtype, enabled=dtype != FP32):
                    loss = (net(inputs).float() - targets).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()], scaler.get_scale()


@pytest.mark.parametrize("dtypes", [(BF16, FP16), (FP32, FP16), (FP32, BF16, FP16)])
def test_workers_may_autocast_in_different_dtypes(dtypes: tuple[torch.dtype, ...]) -> None:
    results = run_workers(len(dtypes), lambda worker: train(worker, dtypes[worker.rank]))
    exact, _ = run_workers(1, lambda worker: train(worker, FP32))[0]
    first, scale = results[0]
    for parameters, other_scale in results[1:]:
        assert other_scale == scale, "all decide alike"
        assert all(torch.equal(own, other) for own, other in zip(first, parameters, strict=True))
    assert scale > 2.0**8, "no step was skipped"
    for own, other in zip(first, exact, strict=True):
        assert torch.allclose(own, other, rtol=0.05, atol=0.02), "as exact as half precision can be"
        assert not torch.equal(own, other), "else this test shows nothing"
