"""Tensors that are not one contiguous run of memory. Gloo reduces and broadcasts the raw storage of these."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.numerics.harness import values
from tests.numerics.harness.worker import Context

View = Callable[[torch.Tensor], torch.Tensor]

VIEWS: dict[str, View] = {
    "row": lambda whole: whole[2],
    "rows": lambda whole: whole[1:4],
    "column": lambda whole: whole[:, 1],
    "columns": lambda whole: whole[:, 1:3],
    "every second": lambda whole: whole[::2, ::3],
    "transposed": lambda whole: whole.t(),
    "0-dim": lambda whole: whole[3, 2],
    "permuted": lambda whole: whole.reshape(7, 5, 2).permute(2, 0, 1),
}


def _whole(rank: int, call: int) -> torch.Tensor:
    return values.inputs("float32", "SUM", 70, rank, call).reshape(7, 10)


def _in_views(
    ctx: Context,
    label: str,
    act: Callable[[torch.Tensor], object],
    wanted: Callable[[list[torch.Tensor]], torch.Tensor],
) -> None:
    """``act`` on a view must change that view as ``wanted`` says, and leave the rest of the memory alone."""
    for call, (name, view) in enumerate(VIEWS.items()):
        wholes = [_whole(rank, call) for rank in range(ctx.world)]
        result = wholes[ctx.rank].clone()
        act(view(result))
        right = wholes[ctx.rank].clone()
        view(right).copy_(wanted([view(whole) for whole in wholes]))
        good = torch.equal(view(result), view(right))
        ctx.check(good, f"{label} of {name}: wrong values")
        ctx.check(not good or torch.equal(result, right), f"{label} of {name}: neighbours overwritten")


def in_place(ctx: Context) -> None:
    group = ctx.group
    _in_views(
        ctx, "all_reduce", lambda t: dist.all_reduce(t, group=group), lambda parts: torch.stack(parts).sum(0)
    )
    for root in range(ctx.world):
        _in_views(
            ctx,
            f"broadcast from {root}",
            lambda t, root=root: dist.broadcast(t, group_src=root, group=group),
            lambda parts, root=root: parts[root],
        )
        _in_views(
            ctx,
            f"reduce to {root}",
            lambda t, root=root: dist.reduce(t, group_dst=root, group=group),
            lambda parts, root=root: torch.stack(parts).sum(0) if ctx.rank == root else parts[ctx.rank],
        )


def gathers(ctx: Context) -> None:
    """Strided inputs and strided outputs of all_gather and gather."""
    wholes = [_whole(rank, 50) for rank in range(ctx.world)]
    for name, view in VIEWS.items():
        parts = [view(whole) for whole in wholes]
        outputs = [view(torch.zeros(7, 10)) for _ in range(ctx.world)]
        dist.all_gather(outputs, parts[ctx.rank], group=ctx.group)
        for rank, output in enumerate(outputs):
            ctx.check(torch.equal(output, parts[rank]), f"all_gather of {name} from {rank}")
        outputs = [view(torch.zeros(7, 10)) for _ in range(ctx.world)] if ctx.rank == 0 else []
        dist.gather(parts[ctx.rank], outputs or None, group_dst=0, group=ctx.group)
        for rank, output in enumerate(outputs):
            ctx.check(torch.equal(output, parts[rank]), f"gather of {name} from {rank}")


def scatters(ctx: Context) -> None:
    """Strided inputs and outputs of reduce_scatter and scatter (Gloo leaves strided outputs wrong)."""
    wholes = [_whole(rank, 51) for rank in range(ctx.world)]
    for name, view in VIEWS.items():
        parts = [view(whole) for whole in wholes]
        strided = [view(torch.zeros(7, 10)).copy_(parts[ctx.rank] * (slot + 1)) for slot in range(ctx.world)]
        output = view(torch.zeros(7, 10))
        dist.reduce_scatter(output, strided, group=ctx.group)
        ctx.check(
            torch.equal(output, torch.stack(parts).sum(0) * (ctx.rank + 1)), f"reduce_scatter of {name}"
        )
        output = view(torch.zeros(7, 10))
        dist.scatter(output, parts if ctx.rank == 0 else None, group_src=0, group=ctx.group)
        ctx.check(torch.equal(output, parts[ctx.rank]), f"scatter of {name}")


def unlike_layouts(ctx: Context) -> None:
    """Row-major on even ranks, column-major on odd ones: the same shape, so the same elements meet."""
    wholes = [_whole(rank, 60) for rank in range(ctx.world)]
    own_tensor = wholes[ctx.rank].clone()
    if ctx.rank % 2:
        own_tensor = own_tensor.t().contiguous().t()
    dist.all_reduce(own_tensor, group=ctx.group)
    ctx.check(torch.equal(own_tensor, torch.stack(wholes).sum(0)), "all_reduce of unlike layouts")
    own_tensor = wholes[ctx.rank].clone()
    if ctx.rank % 2:
        own_tensor = own_tensor.t().contiguous().t()
    dist.broadcast(own_tensor, group_src=ctx.world - 1, group=ctx.group)
    ctx.check(torch.equal(own_tensor, wholes[-1]), "broadcast of unlike layouts")
    outputs = [torch.empty(7, 10) if rank % 2 else torch.empty(10, 7).t() for rank in range(ctx.world)]
    own_tensor = wholes[ctx.rank] if ctx.rank % 2 else wholes[ctx.rank].t().contiguous().t()
    dist.all_gather(outputs, own_tensor, group=ctx.group)
    for rank, output in enumerate(outputs):
        ctx.check(torch.equal(output, wholes[rank]), f"all_gather of unlike layouts from {rank}")


def scalars(ctx: Context) -> None:
    """0-dim tensors through everything that takes them, in every type."""
    for call, dtype in enumerate(("float32", "float64", "int64", "bfloat16", "bool")):
        parts = [values.inputs(dtype, "MAX", 1, rank, call).reshape(()) for rank in range(ctx.world)]
        tensor = parts[ctx.rank].clone()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=ctx.group)
        wanted = values.reduced(dtype, "MAX", [part.reshape(1) for part in parts]).reshape(())
        ctx.check(values.same_bits(tensor, wanted), f"all_reduce {dtype}")
        tensor = parts[ctx.rank].clone()
        dist.broadcast(tensor, group_src=0, group=ctx.group)
        ctx.check(values.same_bits(tensor, parts[0]), f"broadcast {dtype}")
        outputs = [torch.zeros((), dtype=values.DTYPES[dtype]) for _ in range(ctx.world)]
        dist.all_gather(outputs, parts[ctx.rank], group=ctx.group)
        for rank, output in enumerate(outputs):
            ctx.check(values.same_bits(output, parts[rank]), f"all_gather {dtype} from {rank}")


def negated_and_conjugated(ctx: Context) -> None:
    """torch's lazy conjugate and negative bits: memory holds other numbers than the tensor says."""
    parts = [values.inputs("complex64", "SUM", 9, rank, 70) for rank in range(ctx.world)]
    outputs = [torch.zeros(9, dtype=torch.complex64) for _ in range(ctx.world)] if ctx.rank == 0 else None
    dist.gather(parts[ctx.rank].conj(), outputs, group_dst=0, group=ctx.group)
    for rank, output in enumerate(outputs or []):
        good = torch.equal(output, parts[rank].conj().resolve_conj())
        ctx.check(good, f"gather of a conjugate from {rank}")
    reals = [torch.zeros(9) for _ in range(ctx.world)]
    dist.all_gather(reals, torch.conj(parts[ctx.rank]).imag, group=ctx.group)
    for rank, real in enumerate(reals):
        ctx.check(torch.equal(real, -parts[rank].imag), f"all_gather of a negative view from {rank}")
    negative = torch.conj(parts[ctx.rank].clone()).imag
    dist.all_reduce(negative, group=ctx.group)
    ctx.check(torch.equal(negative + 0, -torch.stack(parts).sum(0).imag), "all_reduce of a negative view")


def large_views(ctx: Context) -> None:
    """Strided tensors larger than one frame."""
    count = 700_001
    parts = [values.inputs("float32", "SUM", 2 * count, rank, 80) for rank in range(ctx.world)]
    own_tensor = parts[ctx.rank].clone().reshape(count, 2)
    dist.all_reduce(own_tensor[:, 1], group=ctx.group)
    wanted = parts[ctx.rank].clone().reshape(count, 2)
    wanted[:, 1] = torch.stack(parts).sum(0).reshape(count, 2)[:, 1]
    ctx.check(torch.equal(own_tensor, wanted), "all_reduce of a large column")
