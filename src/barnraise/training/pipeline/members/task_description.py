"""Description of what a member trains, as it reports it to the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from blake3 import blake3
from torch import nn

from barnraise.training.pipeline.members.model_facts import MOST_OPTIONS, ModelFacts, as_words
from barnraise.training.pipeline.outline import ModelOutline
from barnraise.training.pipeline.trained_state import OptimizerFactory, SchedulerFactory

# How a device computes a step of the optimizer, which may differ between machines.
_BY_DEVICE = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
_PLAIN = (bool, int, float, str, tuple, type(None))


def describe_model(model: nn.Module, outline: ModelOutline, options: Mapping[str, object]) -> ModelFacts:
    """Return the facts of a model; its parameters may have no memory."""
    parameters = dict(model.named_parameters())

    def form(name: str) -> tuple[str, tuple[int, ...], str]:
        parameter = parameters[name]
        return name, tuple(parameter.shape), str(parameter.dtype)

    parts = (outline.before, *outline.blocks, outline.after)
    trained = sorted(name for name, parameter in parameters.items() if parameter.requires_grad)
    return ModelFacts(
        as_words(outline.path),
        tuple(_hash(map(form, sorted(part))) for part in parts),
        sum(parameter.numel() for parameter in parameters.values()),
        _hash(trained),
        sum(parameters[name].numel() for name in trained),
        tuple((as_words(name), as_words(value)) for name, value in sorted(options.items())[:MOST_OPTIONS]),
    )


def describe_optimizer(
    make_optimizer: OptimizerFactory, make_scheduler: SchedulerFactory | None, device: torch.device
) -> dict[str, object]:
    """Return the kinds and the options of the optimizer and the scheduler, by name.

    They are made for one small parameter. The options are those of its groups.
    """
    optimizer = make_optimizer([nn.Parameter(torch.zeros(2, 2, device=device))])
    options: dict[str, object] = {"optimizer": type(optimizer).__name__}
    for group in optimizer.param_groups[:1]:
        options |= {
            f"optimizer's {key}": value
            for key, value in group.items()
            if key not in _BY_DEVICE and isinstance(value, _PLAIN)
        }
    if make_scheduler is not None:
        options["scheduler"] = type(make_scheduler(optimizer)).__name__
    return options


def _hash(forms: Iterable[object]) -> bytes:
    return blake3(repr(list(forms)).encode()).digest(8)
