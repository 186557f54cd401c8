"""Tensors of a model by the names of its state dict, without the prefix of torch.compile.

So a checkpoint, another worker and a hub's version fit whether or not each of them compiles the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from barnraise.core.errors import RunError

_COMPILED = "_orig_mod."


def state_of(model: torch.nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return the model's state dict without the prefix of torch.compile."""
    return {_uncompiled(name): value for name, value in model.state_dict(keep_vars=keep_vars).items()}


def tensors_of(model: torch.nn.Module, *, keep_vars: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of the state dict, without the values of `get_extra_state`."""
    state = state_of(model, keep_vars=keep_vars)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def load_state(model: torch.nn.Module, state: Mapping[str, Any], kept: Collection[str] = ()) -> None:
    """Load what `state_of` returned, for this model or for a compiled or uncompiled twin.

    ``kept``: names that the state does not contain, because these tensors keep their values.
    """
    own = {_uncompiled(name): name for name in model.state_dict()}
    named = {own.get(name, name): value for name, value in state.items()}
    if not kept:
        model.load_state_dict(named)
        return
    missing, unexpected = model.load_state_dict(named, strict=False)
    lost = {_uncompiled(name) for name in missing}.difference(kept)
    if lost or unexpected:
        raise RunError(
            f"the state does not fit this model: {', '.join(sorted({*lost, *unexpected})[:3])}",
            hint="Every machine needs the same script and model.",
        )


def _uncompiled(name: str) -> str:
    return name.replace(_COMPILED, "")
