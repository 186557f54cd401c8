"""Placement on the worker's device. The meta device stands for an accelerator."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from barnraise.core.errors import RunError
from barnraise.training.device_placement import move_batch, place_model

META = torch.device("meta")
CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["x", "y"])  # as collate functions make them


class Encoding(UserDict):  # type: ignore[type-arg]
    """As a tokenizer returns it."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def test_model_whose_parameters_would_be_others_is_refused() -> None:
    """torch replaces parameters that move to the meta device. On a real accelerator they stay."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RunError, match="other parameters") as caught:
        place_model(model, [torch.optim.SGD(model.parameters(), lr=0.1)], META)
    assert "before you make the optimizer" in caught.value.hint


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
