"""What a session can train: the rest is refused, by name and with the mend, instead of trained wrongly."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from barnraise.core.errors import RunError
from barnraise.training.state.names_in_state import state_of


def check_prepared(
    model: torch.nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
) -> None:
    """RunError for what could not be exact, or would not reach those who join and the checkpoints."""
    for one in optimizers:
        if _asks_for_more(one):
            raise RunError(
                f"{type(one).__name__} computes the loss again within a step, which no member has all of",
                hint="Use an optimizer whose step() needs no closure, such as AdamW.",
            )
    for one in schedulers:
        _check_scheduler(one)
    _check_owners(model, optimizers)
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(
            module, torch.nn.Embedding | torch.nn.EmbeddingBag
        ):
            raise RunError(
                f"{name or 'the model'} is an embedding with sparse gradients, which cannot be summed here",
                hint="Make it with sparse=False, and use an optimizer for dense gradients.",
            )


def parameters_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def check_all_taken(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """After a unit's gradients were taken: whatever still has one is not summed over the members."""
    for one in optimizers:
        for parameter in parameters_of(one):
            if parameter.grad is not None:
                raise RunError(
                    f"{_name_of(parameter, model)} is trained, but was not when prepare was called",
                    hint="Have requires_grad set, and all parameters in the optimizers, when you call "
                    "prepare. What is frozen after it is not moved, and may be unfrozen again.",
                )


def _check_scheduler(scheduler: Any) -> None:
    name = type(scheduler).__name__
    if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "state_dict"):
        raise RunError(
            f"prepare cannot use a {name}",
            hint="After the loader it takes schedulers and a GradScaler. Use anything else as it is.",
        )
    if _asks_for_more(scheduler):
        raise RunError(
            f"{name}.step() needs a value, and schedulers given to prepare move by themselves",
            hint="Call run.track('scheduler', scheduler) before prepare instead, and step it where all "
            "members do, with a value that all have: scheduler.step(run.history[-1]['loss']) after an epoch.",
        )


def _check_owners(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
    held = {id(one) for one in model.state_dict(keep_vars=True).values()}
    owners: dict[int, Optimizer] = {}
    for one in optimizers:
        strangers = [each for each in parameters_of(one) if each.requires_grad and id(each) not in held]
        if strangers:
            shapes = ", ".join(str(tuple(each.shape)) for each in strangers[:3])
            raise RunError(
                f"{type(one).__name__} trains parameters that are not in the model's state, of shape {shapes}"
                f"{', ...' if len(strangers) > 3 else ''}: they would be neither saved nor sent to others",
                hint="Put all that is trained into one module, for example torch.nn.ModuleDict("
                "{'generator': g, 'discriminator': d}), and give prepare that.",
            )
        for parameter in parameters_of(one):
            if owners.setdefault(id(parameter), one) is not one:
                raise RunError(
                    f"{_name_of(parameter, model)} is in two optimizers",
                    hint="Give each parameter to one optimizer.",
                )


def _name_of(parameter: torch.nn.Parameter, model: torch.nn.Module) -> str:
    names = (name for name, one in state_of(model, keep_vars=True).items() if one is parameter)
    return next(names, f"a parameter of shape {tuple(parameter.shape)}")


def _asks_for_more(thing: Any) -> bool:
    """Whether its step() cannot be called without an argument."""
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    try:
        # Of the class: schedulers put a step of their own into optimizers, which does not say it right.
        _, *asked = inspect.signature(type(thing).step).parameters.values()
    except (AttributeError, TypeError, ValueError):  # it does not say
        return False
    return any(one.default is one.empty and one.kind not in several for one in asked)
