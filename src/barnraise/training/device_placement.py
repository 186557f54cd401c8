"""Placement of the model and of micro-batches on the worker's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree

from barnraise.core.errors import RunError


def place_model(
    model: torch.nn.Module, optimizers: Sequence[Optimizer], device: torch.device
) -> torch.device | None:
    """Move a model from the CPU to the worker's device; return the device for its micro-batches.

    A model that the script has moved elsewhere stays there. None: it is on several devices, so the script
    moves its data. Raise RunError if torch makes new parameters for the device, which optimizers lack.
    """
    devices = _devices_of(model)
    if device.type != "cpu" and devices == {torch.device("cpu")}:
        before = list(model.parameters())
        model.to(device)
        if any(own is not old for own, old in zip(model.parameters(), before, strict=True)):
            raise RunError(
                f"a model on {device} has other parameters than the optimizer",
                hint="Call model.to(run.device) before you make the optimizer.",
            )
        for optimizer in optimizers:
            _move_state(optimizer)
        devices = _devices_of(model)
    return devices.pop() if len(devices) == 1 else None


def move_batch(batch: Any, device: torch.device | None) -> Any:
    """Return a micro-batch with all its tensors on the accelerator, in the same structure.

    Objects with a method ``to``, such as encodings of tokenizers, move themselves.
    """
    if device is None or device.type == "cpu":
        return batch
    return _pytree.tree_map(lambda leaf: _moved(leaf, device), batch)


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.device == device else leaf.to(device, non_blocking=leaf.is_pinned())
    return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf


def _devices_of(model: torch.nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


def _move_state(optimizer: Optimizer) -> None:
    """Move what the optimizer knows of each parameter to the parameter; a count of steps stays."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = value.to(parameter.device)
