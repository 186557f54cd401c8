"""A training with Fabric, as in a script; tests run it alone, in a group and without a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 96, 16


class Trained(NamedTuple):
    parameters: list[float]
    iterations: int


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 4, generator=draw)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(
    fabric: Any,
    epochs: Callable[[int], Iterable[int]] = range,
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    shuffle: bool = False,
    on_iteration: Callable[[int], None] = lambda count: None,
    after_epoch: Callable[[Any, Any], None] = lambda net, optimizer: None,
) -> Trained:
    """Train three epochs; ``on_iteration`` is called between backward and step."""
    fabric.launch()
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    net, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=scheduler)
    loader = DataLoader(data(), batch_size=BATCH // accumulate, shuffle=shuffle)
    loader = fabric.setup_dataloaders(loader)
    count = 0
    for _ in epochs(3):
        for inputs, targets in loader:
            count += 1
            is_step = count % accumulate == 0
            with fabric.no_backward_sync(net, enabled=not is_step):
                fabric.backward(nn.functional.mse_loss(net(inputs), targets) / accumulate)
            on_iteration(count)
            if is_step:
                if max_norm is not None:
                    fabric.clip_gradients(net, optimizer, max_norm=max_norm)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        after_epoch(net, optimizer)
    values = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
    return Trained(values.tolist(), count)
