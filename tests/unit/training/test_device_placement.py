"""Placement on the worker's device. The meta device stands for an accelerator."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import torch

from barnraise.training.device_placement import move_batch, place_model

META = torch.device("meta")
CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["x", "y"])  # as collate functions make them


class Encoding(UserDict):  # type: ignore[type-arg]
    """As a tokenizer returns it."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def test_model_moves_and_its_optimizer_follows() -> None:
    """torch makes new parameters for the meta device, as it does for some accelerators."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    assert place_model(model, [optimizer], META) == META
    assert all(parameter.device == META for parameter in model.parameters())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(own is other for own, other in zip(held, model.parameters(), strict=True))
    assert list(map(id, optimizer.state)) == list(map(id, held))
    assert all(state["momentum_buffer"].device == META for state in optimizer.state.values())


def test_model_that_the_script_placed_stays() -> None:
    model = torch.nn.Linear(2, 2, device=META)
    assert place_model(model, [], CPU) == META
    spread = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device=META))
    assert place_model(spread, [], META) is None, "its script moves the data"
    assert spread[0].weight.device == CPU


def test_tensors_of_any_batch_are_moved() -> None:
    x = torch.ones(2)
    batches: list[Any] = [x, [x, x], (x, {"y": x, "name": "a"}), Pair(x, [x]), Encoding(x=x)]
    for batch in batches:
        moved = move_batch(batch, META)
        assert type(moved) is type(batch)
        leaves = torch.utils._pytree.tree_leaves(dict(moved) if isinstance(moved, Encoding) else moved)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        assert tensors
        assert all(tensor.device == META for tensor in tensors)


def test_batches_stay_where_there_is_no_accelerator() -> None:
    batch = [torch.ones(2)]
    assert move_batch(batch, CPU) is batch
    assert move_batch(batch, None) is batch


def test_packed_sequence_moves_as_a_whole() -> None:
    """Its lengths must stay on the CPU."""
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    moved = move_batch({"words": packed}, META)["words"]
    assert moved.data.device == META
    assert moved.batch_sizes.device == CPU
