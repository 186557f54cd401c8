"""Buffers that forward mutates, and extra state of modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import barnraise
from barnraise.core.errors import RunError

ROWS = TensorDataset(torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(1)))


class Codebook(torch.nn.Module):
    """Module that counts ``use`` in forward, which differs between workers."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("use", torch.zeros(4), persistent=persistent)
        self.use: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.use += x.mean((0, 1)).detach()
        return x


class Annotated(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"made": "by hand"}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"made": "by hand"}


def _train(*layers: torch.nn.Module) -> Any:
    net = torch.nn.Sequential(*layers, torch.nn.Flatten(), Annotated(12, 1))
    run = barnraise.init(unit=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _, _, batches = run.prepare(net, optimizer, DataLoader(ROWS, batch_size=6))
    for batch in batches:
        for (x,) in batch:
            net(x).square().mean().backward()
            optimizer.step()
    return run


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4)), "0.parametrizations"),
        (lambda: torch.nn.InstanceNorm1d(3, track_running_stats=True), "0.running_mean"),
        (lambda: Codebook(persistent=True), "0.use"),
    ],
)
def test_buffer_mutated_in_forward_is_named(layer: Any, name: str) -> None:
    with pytest.raises(RunError, match=f"forward writes into {name}") as caught:
        _train(layer())
    assert "run.on_commit" in caught.value.hint


def test_hints_for_mutated_buffers_work() -> None:
    _train(Codebook(persistent=False))
    still = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
    _train(still.eval())
    _train(torch.nn.InstanceNorm1d(3), torch.nn.BatchNorm1d(3))


def test_module_with_extra_state_is_saved(tmp_path: Path) -> None:
    run = _train()
    run.save(tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == {"1.weight", "1.bias"}
    run._state.load(run._state.flatten(run.done))
