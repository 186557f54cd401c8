"""Serves ``torch.distributed.monitored_barrier`` on groups of ours; torch has it for Gloo only."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_SHELL = "barnraise.collectives.c10d.process_group"


def install_monitored_barrier() -> None:
    """Wrap torch's function in both modules that export it.

    Groups of other backends, and calls that torch rejects, reach torch's function as before.
    """
    original = distributed_c10d.monitored_barrier
    signature = inspect.signature(original)

    @functools.wraps(original)
    def monitored_barrier(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:  # torch raises its own error
            return original(*args, **kwargs)
        group = arguments.get("group") or dist.group.WORLD
        if not _is_ours(group):
            return original(*args, **kwargs)
        # Every missing rank is named with either value of `wait_all_ranks`.
        return group.monitored_barrier(arguments.get("timeout"))

    for module in (dist, distributed_c10d):
        setattr(module, original.__name__, monitored_barrier)


def _is_ours(group: object) -> bool:
    # Without an import: a process that has not loaded the class has no group of it.
    shell = sys.modules.get(_SHELL)
    return shell is not None and isinstance(group, shell.BarnraiseProcessGroup)
