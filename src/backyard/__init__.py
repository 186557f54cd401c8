"""Backyard trains PyTorch models on the machines you already own."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = [
    "BackyardError",
    "PeerLost",
    "Sync",
    "SyncBatchNorm",
    "__version__",
    "init",
    "launch",
    "load_sharded",
    "save_sharded",
    "wait_for_peers",
]

# Loaded at the first use and by name only: the command line starts without torch, and the packages that read
# the version from here do not depend on the rest.
_HOMES = {
    "BackyardError": "backyard.core.errors",
    "PeerLost": "backyard.core.errors",
    "Sync": "backyard.training.sync",
    "SyncBatchNorm": "backyard.collectives",
    "init": "backyard.worker.beginning",
    "launch": "backyard.worker.launch",
    "load_sharded": "backyard.checkpoint.sharded",
    "save_sharded": "backyard.checkpoint.sharded",
    "wait_for_peers": "backyard.worker.peers",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
