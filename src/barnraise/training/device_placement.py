"""Placement of the model and of micro-batches on the worker's device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree

from barnraise.core import metrics
from barnraise.core.metrics import catalogue


def device_of_worker() -> torch.device:
    """Return the device that this worker should use."""
    assigned = os.environ.get("BARNRAISE_DEVICE")
    if assigned:
        return torch.device(assigned)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def count_device_memory(device: torch.device) -> None:
    """Show the memory that torch has allocated on an accelerator in the metrics of this worker."""
    if device.type == "cpu":
        return
    try:
        torch.accelerator.memory_allocated(device)
    except (RuntimeError, NotImplementedError, AttributeError):  # not every kind of device counts it
        return
    gauge = metrics.gauge(catalogue.TORCH_MEMORY, str(device))
    gauge.set_function(lambda: float(torch.accelerator.memory_allocated(device)))


def place_model(
    model: torch.nn.Module, optimizers: Sequence[Optimizer], device: torch.device
) -> torch.device | None:
    """Move a model from the CPU to the worker's device; return the device for its micro-batches.

    A model that the script has moved elsewhere stays there. None: it is on several devices, so the script
    moves its data.
    """
    devices = _devices_of(model)
    if device.type != "cpu" and devices == {torch.device("cpu")}:
        before = list(model.parameters())
        model.to(device)
        moved = {id(old): new for old, new in zip(before, model.parameters(), strict=True)}
        for optimizer in optimizers:
            _follow(optimizer, moved)
        devices = _devices_of(model)
    return devices.pop() if len(devices) == 1 else None


def move_batch(batch: Any, device: torch.device | None) -> Any:
    """Return a micro-batch with all its tensors on the accelerator, in the same structure.

    Objects with a method ``to``, such as encodings of tokenizers, move themselves.
    """
    if device is None or device.type == "cpu":
        return batch
    return _pytree.tree_map(lambda leaf: _moved(leaf, device), batch, is_leaf=_moves_itself)


def _moves_itself(thing: Any) -> bool:
    return callable(getattr(thing, "to", None))


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.device == device else leaf.to(device, non_blocking=leaf.is_pinned())
    return leaf.to(device) if _moves_itself(leaf) else leaf


def _devices_of(model: torch.nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


def _follow(optimizer: Optimizer, moved: Mapping[int, torch.nn.Parameter]) -> None:
    """Let an optimizer train the moved parameters, and move its state to them; a count of steps stays.

    On most devices parameters stay the same objects. On some, torch makes new ones.
    """
    for group in optimizer.param_groups:
        group["params"] = [moved.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter, state in list(optimizer.state.items()):
        new = moved.get(id(parameter), parameter)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == new.shape:
                state[name] = value.to(new.device)
        del optimizer.state[parameter]
        optimizer.state[new] = state
