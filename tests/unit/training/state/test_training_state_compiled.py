"""Models with torch.compile: the same steps, and the same names in every state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from barnraise.runs.sharding import DataOrder
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.hub.flat_parameters import FlatParameters
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.flat_loop import microbatches

NET = torch.nn.Sequential(
    torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
).double()
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1)).double()


def _compiled(net: torch.nn.Sequential) -> Any:
    return torch.compile(net, backend="eager")


def _within(net: torch.nn.Sequential) -> Any:
    net[0] = torch.compile(net[0], backend="aot_eager")  # type: ignore[assignment]
    return net


def _in_place(net: torch.nn.Sequential) -> Any:
    net.compile(backend="eager")
    return net


class Script:
    def __init__(self, make: Callable[[torch.nn.Sequential], Any]) -> None:
        self.run = Session(
            SingleWorkerManager(), seed=3, unit=3, checkpoints=CheckpointManager(None, 60.0, 1)
        )
        net = make(copy.deepcopy(NET))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        loader = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=6)
        self.net, self.optimizer, self.batches = self.run.prepare(net, optimizer, loader)

    def train(self, stop: int = 4) -> Script:
        for x, y in microbatches(self.batches):
            if self.run.done == stop:
                break
            torch.nn.functional.mse_loss(self.net(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize("make", [_compiled, _within, _in_place])
def test_compiled_model_has_same_spec(make: Any, tmp_path: Path) -> None:
    plain, ours = Script(lambda net: net).train(), Script(make).train()
    assert ours.run.done == 4
    ours.run.save(tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    wanted = plain.net.state_dict()
    assert set(saved) == set(wanted)
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-9)
    assert [entry.name for entry in _layout(ours)] == [entry.name for entry in _layout(plain)]


def _layout(script: Script) -> Any:
    """Return the layout that a hub receives."""
    flat = FlatParameters(script.run._state.model, script.run._reducer)
    return flat.spec(DataOrder(24, 6, 3, seed=3)).layout


@pytest.mark.parametrize("make", [_compiled, _within])
def test_compiled_and_plain_model_share_state(make: Any) -> None:
    """A joining worker may receive the state from either."""
    whole = Script(lambda net: net).train()
    for first, second in ((make, lambda net: net), (lambda net: net, make)):
        half, late = Script(first).train(stop=2), Script(second)
        parts = half.run._state.flatten(half.run.done)
        late.run._step_loop.done = late.run._state.load(parts)
        late.run._step_loop._start_next_step()
        assert late.run.state_digest() == half.run.state_digest()
        late.train()
        assert late.run.done == 4
        for actual, expected in zip(late.net.parameters(), whole.net.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
