"""GradScaler in a session: equals training without one, with one decision for the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import barnraise


def _train(scaled: bool, poison: int | None = None) -> tuple[list[torch.Tensor], float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(64, 4, dtype=torch.float64)
    if poison is not None:
        x[poison] = float("inf")
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
    run = barnraise.init(unit=4)
    model, optimizer, batches, scaler = run.prepare(model, optimizer, loader, scaler)
    for batch in batches:
        for x, y in batch:
            loss = (model(x) - y).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], scaler.get_scale()


def test_scaled_training_equals_unscaled() -> None:
    plain, _ = _train(scaled=False)
    scaled, scale = _train(scaled=True)
    assert scale == 2.0**12, "it grew after every second of four steps"
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("sample", [0, 17, 63])
def test_infinite_gradient_skips_step_and_halves_scale(sample: int) -> None:
    parameters, scale = _train(scaled=True, poison=sample)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in parameters)
    assert scale in (2.0**10, 2.0**9, 2.0**11)
    assert scale != 2.0**12
