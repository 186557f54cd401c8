"""Checks of the objects given to `prepare`: what cannot be trained exactly is rejected with a hint."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from barnraise.core.errors import RunError
from barnraise.training.state.model_tensors import state_of


def check_prepared(
    model: torch.nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
) -> None:
    """Raise RunError for what cannot be exact, or would be missing in checkpoints and on joining workers."""
    for optimizer in optimizers:
        if _needs_arguments(optimizer):
            raise RunError(
                f"{type(optimizer).__name__} computes the loss again in step(), "
                "but no worker has the whole batch",
                hint="Use an optimizer whose step() needs no closure, such as AdamW.",
            )
    for scheduler in schedulers:
        _check_scheduler(scheduler)
    _check_owners(model, optimizers)
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(
            module, torch.nn.Embedding | torch.nn.EmbeddingBag
        ):
            raise RunError(
                f"{name or 'the model'} is an embedding whose sparse gradients cannot be all-reduced",
                hint="Make it with sparse=False, and use an optimizer for dense gradients.",
            )


def unused_device(model: torch.nn.Module, device: torch.device) -> str:
    """Return a warning if the model is on the CPU though this worker has another device; empty if not."""
    kinds = {parameter.device.type for parameter in model.parameters()}
    if device.type == "cpu" or kinds != {"cpu"}:
        return ""
    return f"this worker has {device}, but the model is on the CPU; move it with model.to(run.device)"


def parameters_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def check_all_taken(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise RunError if a parameter still has a gradient, because no optimizer had it at `prepare`."""
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                raise RunError(
                    f"{_name_of(parameter, model)} was given to an optimizer after prepare was called",
                    hint="Have all parameters in the optimizers when you call prepare, also those that you "
                    "unfreeze later. A frozen parameter does not move.",
                )


def _check_scheduler(scheduler: Any) -> None:
    name = type(scheduler).__name__
    if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "state_dict"):
        raise RunError(
            f"prepare cannot use a {name}",
            hint="After the loader, prepare takes schedulers and a GradScaler. Use other objects directly.",
        )
    if _needs_arguments(scheduler):
        raise RunError(
            f"{name}.step() needs a value, and schedulers given to prepare move by themselves",
            hint="Call run.track('scheduler', scheduler) before prepare instead, and step it where all "
            "workers do, with a value that all have: scheduler.step(run.history[-1]['loss']) after an epoch.",
        )


def _check_owners(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
    held = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        unknown = [
            parameter
            for parameter in parameters_of(optimizer)
            if parameter.requires_grad and id(parameter) not in held
        ]
        if unknown:
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in unknown[:3])
            raise RunError(
                f"{type(optimizer).__name__} trains parameters that are not in the model's state, "
                f"of shape {shapes}{', ...' if len(unknown) > 3 else ''}: "
                "they would be neither saved nor sent to others",
                hint="Put everything that is trained into one module, for example torch.nn.ModuleDict("
                "{'generator': g, 'discriminator': d}), and give prepare that.",
            )
        for parameter in parameters_of(optimizer):
            if owners.setdefault(id(parameter), optimizer) is not optimizer:
                raise RunError(
                    f"{_name_of(parameter, model)} is in two optimizers",
                    hint="Give each parameter to one optimizer.",
                )


def _name_of(parameter: torch.nn.Parameter, model: torch.nn.Module) -> str:
    names = (name for name, tensor in state_of(model, keep_vars=True).items() if tensor is parameter)
    return next(names, f"a parameter of shape {tuple(parameter.shape)}")


def _needs_arguments(thing: Any) -> bool:
    """Tell whether ``step()`` cannot be called without arguments."""
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    try:
        # Of the class, because schedulers wrap an optimizer's step in a function with another signature.
        _, *required = inspect.signature(type(thing).step).parameters.values()
    except (AttributeError, TypeError, ValueError):  # there is no signature
        return False
    return any(
        parameter.default is parameter.empty and parameter.kind not in variadic for parameter in required
    )
