"""Memory of optimizers after it was loaded: on which device each part is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from barnraise.training.pipeline.trained_state import TrainedState


@pytest.mark.parametrize("is_fused", [False, True])
def test_memory_of_an_optimizer_is_where_it_keeps_it(is_fused: bool) -> None:
    """The device without memory stands for an accelerator. Adafactor's rows have another shape."""
    parameter = nn.Parameter(torch.empty(2, 3, device="meta"))
    state = TrainedState(
        {"w": parameter}, lambda parameters: torch.optim.AdamW(parameters, lr=0.1), make_scheduler=None
    )
    assert state.optimizer is not None
    state.optimizer.param_groups[0]["fused"] = is_fused
    memory = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2, 3), "row_var": torch.zeros(2)}
    state.load({"w": {"value": torch.zeros(2, 3), "memory": memory}})
    kept = state.optimizer.state[parameter]
    assert kept["exp_avg"].device.type == kept["row_var"].device.type == "meta"
    assert kept["step"].device.type == ("meta" if is_fused else "cpu")


def test_schedule_does_not_replace_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    state = TrainedState({"w": parameter}, lambda parameters: torch.optim.SGD(parameters, lr=0.1), None)
    state.load_schedule({"groups": [{"lr": 0.5, "params": []}], "scheduler": {}})
    assert state.optimizer is not None
    assert state.optimizer.param_groups[0]["params"] == [parameter]
    assert state.optimizer.param_groups[0]["lr"] == 0.5
