"""Accelerate in a worker of a session: each worker is a program of its own, without a process group.

Accelerate reads the variables of torch's launcher and would start a process group of a fixed size. The
session has its own groups, which change while it trains.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DEVICE = "ACCELERATE_TORCH_DEVICE"


@contextlib.contextmanager
def _without_launcher(*, is_on_cpu: bool) -> Iterator[None]:
    """Remove the launcher's variables for the duration of the context, and name this worker's device."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    device = os.environ.get("BARNRAISE_DEVICE")
    if is_on_cpu:  # Accelerate would prefer the variable to its own argument
        os.environ[_DEVICE] = "cpu"
    elif device:
        os.environ[_DEVICE] = device
    try:
        yield
    finally:
        os.environ.update(hidden)


def keep_accelerate_single() -> None:
    """Let Accelerate see one process, in a process that an agent launched."""
    from accelerate.state import PartialState

    original = PartialState.__init__
    if not os.environ.get("BARNRAISE_LAUNCHED") or getattr(original, "_is_single", False):
        return

    @wraps(original)
    def initialize(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> None:
        with _without_launcher(is_on_cpu=cpu):
            original(self, cpu, *args, **kwargs)

    initialize._is_single = True  # type: ignore[attr-defined]
    PartialState.__init__ = initialize


def keep_device(args: Any) -> None:
    """Let ``TrainingArguments`` name the device that the agent has assigned to this worker.

    They take the first accelerator of the machine, and Accelerate takes the assigned device. So the model and
    its inputs would be on different devices.
    """
    assigned = os.environ.get("BARNRAISE_DEVICE")
    if not assigned:
        return
    device, chosen = torch.device("cpu" if args.use_cpu else assigned), args.device
    if (device.type, device.index or 0) == (chosen.type, chosen.index or 0):
        return
    args.__dict__["_setup_devices"], args._n_gpu = device, 0 if device.type == "cpu" else 1
    if device.type == "cuda":
        torch.cuda.set_device(device)
