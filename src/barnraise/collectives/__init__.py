"""The ``barnraise`` c10d backend: torch's collectives over authenticated links, run by a helper process.

May import ``runs``, ``planning`` and everything below them. The communication process and the modules it
uses never import torch. Importing this package does not import torch either: modules that need torch are
loaded at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from barnraise.core.errors import (
    CollectiveError,
    CommProcessLost,
    OperationAborted,
    OperationMismatch,
    OperationTimeout,
    PeerLost,
    TorchMissing,
    UnsupportedOperation,
)

if TYPE_CHECKING:
    from barnraise.collectives.batch_norm import SyncBatchNorm
    from barnraise.collectives.c10d.create import create_group
    from barnraise.collectives.c10d.leaders import all_reduce_by_leaders
    from barnraise.collectives.c10d.process_group import BarnraiseProcessGroup
    from barnraise.collectives.client import statistics
    from barnraise.collectives.per_call import call_options
    from barnraise.collectives.work import BarnraiseWork

__all__ = [
    "BarnraiseProcessGroup",
    "BarnraiseWork",
    "CollectiveError",
    "CommProcessLost",
    "OperationAborted",
    "OperationMismatch",
    "OperationTimeout",
    "PeerLost",
    "SyncBatchNorm",
    "UnsupportedOperation",
    "all_reduce_by_leaders",
    "call_options",
    "create_group",
    "statistics",
]

_HOMES = {
    "BarnraiseProcessGroup": "c10d.process_group",
    "BarnraiseWork": "work",
    "SyncBatchNorm": "batch_norm",
    "all_reduce_by_leaders": "c10d.leaders",
    "call_options": "per_call",
    "create_group": "c10d.create",
    "statistics": "client",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TorchMissing(f"{name} needs torch, which is not installed") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
