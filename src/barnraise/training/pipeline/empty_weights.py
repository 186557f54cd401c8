"""Models without weights: their parameters are on the meta device, and their buffers are real."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Put every parameter that is registered in the context on the meta device, where it has no memory.

    Buffers stay real, because no file has those that a module computes, such as rotary tables.
    """
    # The hook may return another parameter, which the stub does not know.
    hook = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _to_meta(
    module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
) -> torch.nn.Parameter | None:
    """Return the parameter without memory; None keeps it as it is."""
    if parameter is None or parameter.is_meta:
        return None
    return empty_like(parameter)


def empty_like(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the same parameter on the meta device, with the attributes that libraries have set on it."""
    empty = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    empty.__dict__.update(parameter.__dict__)
    return empty
