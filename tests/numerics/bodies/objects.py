"""Object collectives (torch pickles them; the backend only moves bytes)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.numerics.harness.worker import Context


def _thing(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "ä" * (rank * 37 + 1), "list": list(range(rank * 5)), "none": None}


def everything(ctx: Context) -> None:
    gathered: list[Any] = [None] * ctx.world
    dist.all_gather_object(gathered, _thing(ctx.rank), group=ctx.group)
    ctx.check(gathered == [_thing(rank) for rank in range(ctx.world)], "all_gather_object")
    for root in range(ctx.world):
        objects: list[Any] = [_thing(root), root, "x" * root] if ctx.rank == root else [None] * 3
        dist.broadcast_object_list(objects, group_src=root, group=ctx.group)
        ctx.check(objects == [_thing(root), root, "x" * root], f"broadcast_object_list from {root}")
        collected: list[Any] | None = [None] * ctx.world if ctx.rank == root else None
        dist.gather_object(_thing(ctx.rank + 10 * root), collected, group_dst=root, group=ctx.group)
        if collected is not None:
            wanted = [_thing(rank + 10 * root) for rank in range(ctx.world)]
            ctx.check(collected == wanted, f"gather_object to {root}")
        given = [_thing(rank) for rank in range(ctx.world)] if ctx.rank == root else None
        received: list[Any] = [None]
        dist.scatter_object_list(received, given, group_src=root, group=ctx.group)
        ctx.check(received == [_thing(ctx.rank)], f"scatter_object_list from {root}")
    if ctx.world > 1:
        _pairwise(ctx)


def _pairwise(ctx: Context) -> None:
    if ctx.rank == 0:
        dist.send_object_list([_thing(3), "pair"], group_dst=1, group=ctx.group)
    elif ctx.rank == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, group_src=0, group=ctx.group)
        ctx.check(received == [_thing(3), "pair"], "recv_object_list")
