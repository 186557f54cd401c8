"""Ranks that call different things: every rank must get an error that says so, and other groups go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.numerics.harness.worker import Context

Call = Callable[[dist.ProcessGroup, int], object]


def _size(group: dist.ProcessGroup, rank: int) -> object:
    return dist.all_reduce(torch.ones(10 + (rank == 1)), group=group)


def _dtype(group: dist.ProcessGroup, rank: int) -> object:
    dtype = torch.int32 if rank == 1 else torch.float32
    return dist.all_reduce(torch.ones(10, dtype=dtype), group=group)


def _operation(group: dist.ProcessGroup, rank: int) -> object:
    operation = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
    return dist.all_reduce(torch.ones(10), op=operation, group=group)


def _kind(group: dist.ProcessGroup, rank: int) -> object:
    if rank == 1:
        return dist.broadcast(torch.ones(10), group_src=0, group=group)
    return dist.all_reduce(torch.ones(10), group=group)


def _root(group: dist.ProcessGroup, rank: int) -> object:
    """Call with different roots. Some ranks may receive, but none may pass the next barrier."""
    dist.broadcast(torch.ones(10), group_src=int(rank == 1), group=group)
    return dist.barrier(group=group)


def _gathered(group: dist.ProcessGroup, rank: int) -> object:
    count = 10 + (rank == 1)
    output = torch.empty(count * dist.get_world_size(group))
    return dist.all_gather_single(output, torch.ones(count), group=group)


def _scattered(group: dist.ProcessGroup, rank: int) -> object:
    count = 10 + (rank == 1)
    return dist.reduce_scatter_single(
        torch.empty(count), torch.ones(count * dist.get_world_size(group)), group=group
    )


def _barrier(group: dist.ProcessGroup, rank: int) -> object:
    if rank == 1:
        return dist.barrier(group=group)
    return dist.all_reduce(torch.ones(10), group=group)


def _large(group: dist.ProcessGroup, rank: int) -> object:
    return dist.all_reduce(torch.ones(1_000_000 + (rank == 1)), group=group)


def _exchanged(group: dist.ProcessGroup, rank: int) -> object:
    """Rank 1 sends one element more to rank 0 than rank 0 expects; the others may well get all of theirs."""
    world = dist.get_world_size(group)
    to = [2] * world
    if rank == 1:
        to[0] = 3
    dist.all_to_all_single(torch.empty(2 * world), torch.ones(sum(to)), [2] * world, to, group=group)
    return dist.barrier(group=group)


CASES: dict[str, Call] = {
    "size": _size,
    "dtype": _dtype,
    "operation": _operation,
    "kind": _kind,
    "root": _root,
    "all_gather size": _gathered,
    "reduce_scatter size": _scattered,
    "barrier": _barrier,
    "large size": _large,
    "all_to_all splits": _exchanged,
}


def raises_everywhere(ctx: Context, case: str) -> str:
    """A fresh group disagrees; each rank reports its error, and the older group still works."""
    group = dist.new_group(list(range(ctx.world)), timeout=timedelta(seconds=50))
    started = time.monotonic()
    message = ""
    try:
        CASES[case](group, ctx.rank)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    elapsed = time.monotonic() - started
    ctx.check(bool(message), f"{case}: did not raise")
    ctx.check(elapsed < 30, f"{case}: took {elapsed:.1f} s, which smells of a timeout")
    tensor = torch.full((5,), float(ctx.rank))
    dist.all_reduce(tensor, group=ctx.group)
    ctx.check(tensor[0].item() == sum(range(ctx.world)), f"{case}: the older group is broken")
    dist.destroy_process_group(group)
    return message


def monitored_barrier_passes(ctx: Context) -> None:
    for _ in range(3):
        dist.monitored_barrier(ctx.group, timedelta(seconds=50))


def monitored_barrier_names(ctx: Context, missing: list[int]) -> str:
    """Check that all ranks but the missing ones get an error that names them."""
    group = dist.new_group(list(range(ctx.world)), timeout=timedelta(seconds=50))
    dist.barrier(group=ctx.group)
    message = ""
    if ctx.rank not in missing:
        try:
            dist.monitored_barrier(group, timedelta(seconds=4))
        except Exception as error:
            message = str(error)
    dist.barrier(group=ctx.group)
    dist.destroy_process_group(group)
    return message


def gloo_monitored_barrier(ctx: Context) -> None:
    dist.monitored_barrier(group=ctx.group, timeout=timedelta(seconds=50))
