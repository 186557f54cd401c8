"""A group of a session as the default group of ``torch.distributed``.

Libraries over torch.distributed, such as its pipelining, find members and backend of a group by the default
group. The group is connected already, so making it the default sends nothing.
"""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from barnraise.collectives.c10d.process_group import BarnraiseProcessGroup
from barnraise.collectives.torch_patch.autoload import DEVICES
from barnraise.collectives.torch_patch.torch_version import has_python_backends
from barnraise.core.errors import RunError, UnsupportedOperation

_NAME = "barnraise_session"
_chosen: list[BarnraiseProcessGroup] = []


def make_default(group: BarnraiseProcessGroup) -> None:
    """Make a connected group the default group, if it is not yet.

    Raise RunError if the script has one of its own, or if this torch needs other classes (decision 73).
    """
    if has_python_backends(torch.__version__):
        raise UnsupportedOperation(
            f"a model cannot be split with torch {torch.__version__} yet", hint="Use torch 2.13 or 2.14."
        )
    if dist.is_initialized() and dist.group.WORLD is group:
        return
    if dist.is_initialized():
        raise RunError(
            "a session that splits a model needs the default group of torch.distributed, which the script "
            "has initialized",
            hint="Remove init_process_group from the script.",
        )
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, lambda *_: _chosen[0], devices=list(DEVICES))
    _chosen[:] = [group]
    # Scripts that `barnraise run` starts have a wrapper here, which would choose another backend.
    initialize = inspect.unwrap(dist.init_process_group)
    initialize(_NAME, store=HashStore(), rank=group.rank(), world_size=group.size())


def remove_default(group: BarnraiseProcessGroup) -> None:
    """Shut a group down if it is the default group."""
    if _chosen and _chosen[0] is group:
        _chosen.clear()
        if dist.is_initialized() and dist.group.WORLD is group:
            dist.destroy_process_group()
