"""A group whose members change while its object stays, as torch reconfigures groups from 2.15 on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from barnraise.collectives.c10d.create import create_reconfigurable
from barnraise.collectives.c10d.process_group import BarnraiseProcessGroup
from barnraise.core.errors import CollectiveError
from tests.numerics.harness.worker import Context


@dataclass
class Options:
    """Options of a reconfiguration, with the fields of torch's own."""

    uuid: int
    handles: Sequence[str]
    timeout: timedelta | None = timedelta(seconds=30)


def members_change(ctx: Context) -> None:
    """Alone, all, all but the last rank in reverse order, and all again after an abort."""
    group = create_reconfigurable(timedelta(seconds=60))
    try:
        group.allreduce([torch.ones(1)])
        ctx.check(False, "a group without members computed a sum")
    except CollectiveError:
        pass
    handles: list[str] = [""] * ctx.world
    dist.all_gather_object(handles, group.get_reconfigure_handle(), group=ctx.group)
    _reconfigure(ctx, group, 100 + ctx.rank, [handles[ctx.rank]], 0)
    _reconfigure(ctx, group, 200, handles, ctx.rank)
    fewer = handles[: ctx.world - 1][::-1]
    if ctx.rank < ctx.world - 1:
        _reconfigure(ctx, group, 300, fewer, ctx.world - 2 - ctx.rank)
    dist.barrier(group=ctx.group)
    group.abort()
    ctx.check(group.get_error() == ErrorType.COMM_ERROR, "no error after the abort")
    dist.barrier(group=ctx.group)
    _reconfigure(ctx, group, 400, handles, ctx.rank)
    ctx.check(group.get_error() == ErrorType.SUCCESS, "an error after the group was opened again")
    group.shutdown()


def _reconfigure(
    ctx: Context, group: BarnraiseProcessGroup, uuid: int, handles: Sequence[str], rank: int
) -> None:
    group.reconfigure(Options(uuid, handles)).wait()
    ctx.check(group.size() == len(handles), f"size {group.size()} after {uuid}")
    ctx.check(group.rank() == rank, f"rank {group.rank()} after {uuid}")
    tensor = torch.full((1000,), rank + 1.0)
    group.allreduce([tensor]).wait()
    wanted = len(handles) * (len(handles) + 1) / 2
    ctx.check(bool((tensor == wanted).all()), f"sum {tensor[0]} after {uuid}")
