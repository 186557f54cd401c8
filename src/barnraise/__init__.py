"""Barnraise trains PyTorch models on the machines you already own."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = [
    "BarnraiseError",
    "PeerLost",
    "Sync",
    "SyncBatchNorm",
    "__version__",
    "device_mesh",
    "health",
    "init",
    "init_process_group",
    "launch",
    "load_sharded",
    "model_path",
    "optuna",
    "rpc",
    "save_sharded",
    "sync_replicas",
    "wait_for_peers",
    "watch",
]

# Loaded at the first use and by name only: the command line starts without torch, and the packages that read
# the version from here do not depend on the rest.
_HOMES = {
    "BarnraiseError": "barnraise.core.errors",
    "PeerLost": "barnraise.core.errors",
    "Sync": "barnraise.training.sync",
    "SyncBatchNorm": "barnraise.collectives",
    "device_mesh": "barnraise.worker.device_mesh",
    "health": "barnraise.agent_client.metrics.health",
    "init": "barnraise.worker.init",
    "init_process_group": "barnraise.worker.init_process_group",
    "launch": "barnraise.worker.launch.launch",
    "load_sharded": "barnraise.checkpoint.sharded",
    "model_path": "barnraise.worker.model_path",
    "save_sharded": "barnraise.checkpoint.sharded",
    "sync_replicas": "barnraise.training.replica_sync",
    "wait_for_peers": "barnraise.worker.wait_for_peers",
    "watch": "barnraise.display.notebook.live",
}


_MODULES = {"optuna": "barnraise.integrations.optuna", "rpc": "barnraise.rpc"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
