"""Unit tests of distributed code: several ranks as threads of one process, with delays and deaths on demand.

May import ``collectives``, what is below it, and torch. No other package may import it. Importing it does not
import torch: modules that need torch are loaded at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from barnraise.core.errors import TorchMissing

if TYPE_CHECKING:
    from barnraise.testing.simulation import spawn

__all__ = ["spawn"]


def __getattr__(name: str) -> Any:
    if name != "spawn":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = import_module(f"{__name__}.simulation").spawn
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TorchMissing("barnraise.testing.spawn needs torch, which is not installed") from error
    globals()[name] = value
    return value
