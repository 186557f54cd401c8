"""Backyard trains PyTorch models on the machines you already own."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = ["BackyardError", "PeerLost", "SyncBatchNorm", "__version__"]

# Loaded at the first use and by name only: the command line starts without torch, and the packages that read
# the version from here do not depend on the rest.
_HOMES = {
    "BackyardError": "backyard.core.errors",
    "PeerLost": "backyard.core.errors",
    "SyncBatchNorm": "backyard.collectives",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
