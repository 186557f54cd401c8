"""A model's state under the names that it has without torch.compile, which puts a module around a module.

So a checkpoint, a member and a hub's version fit whether or not each of them compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_COMPILED = "_orig_mod."


def state_of(model: torch.nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Parameters, buffers, and whatever else modules say of themselves."""
    return {_plain(name): value for name, value in model.state_dict(keep_vars=keep_vars).items()}


def tensors_of(model: torch.nn.Module, *, keep_vars: bool = False) -> dict[str, torch.Tensor]:
    """Without what modules keep as `get_extra_state`, which may be anything."""
    state = state_of(model, keep_vars=keep_vars)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def load_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """What `state_of` gave, of this model or of one that is compiled otherwise."""
    own = {_plain(name): name for name in model.state_dict()}
    model.load_state_dict({own.get(name, name): value for name, value in state.items()})


def _plain(name: str) -> str:
    return name.replace(_COMPILED, "")
