"""Functional collectives, their coalesced and differentiable forms, and the coalescing manager."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.numerics.harness import values
from tests.numerics.harness.worker import Context


def _parts(ctx: Context, count: int, call: int, dtype: str = "float32") -> list[torch.Tensor]:
    return [values.inputs(dtype, "SUM", count, rank, call) for rank in range(ctx.world)]


def _equal(ctx: Context, label: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    ctx.check(torch.equal(got, wanted), f"{label}: {got.reshape(-1)[:4]} is not {wanted.reshape(-1)[:4]}")


def plain(ctx: Context) -> None:
    parts = _parts(ctx, 6 * ctx.world, 1)
    own_part, group = parts[ctx.rank], ctx.group
    before = own_part.clone()
    _equal(ctx, "all_reduce", funcol.all_reduce(own_part, "sum", group) + 0, sum(parts))
    _equal(ctx, "max", funcol.all_reduce(own_part, "max", group) + 0, torch.stack(parts).amax(0))
    _equal(ctx, "gather", funcol.all_gather_tensor(own_part, 0, group) + 0, torch.cat(parts))
    wide = [part.reshape(3, -1) for part in parts]
    _equal(ctx, "gather dim 1", funcol.all_gather_tensor(wide[ctx.rank], 1, group) + 0, torch.cat(wide, 1))
    size = 6
    scattered = funcol.reduce_scatter_tensor(own_part, "sum", 0, group) + 0
    _equal(ctx, "reduce_scatter", scattered, sum(parts)[ctx.rank * size : (ctx.rank + 1) * size])
    for root in range(ctx.world):
        _equal(ctx, f"broadcast {root}", funcol.broadcast(own_part, root, group) + 0, parts[root])
    send_sizes = [3 + (peer + ctx.rank) % 3 for peer in range(ctx.world)]
    inputs = [
        _parts(ctx, 100, 3)[rank][: sum(3 + (peer + rank) % 3 for peer in range(ctx.world))]
        for rank in range(ctx.world)
    ]
    receive_sizes = [3 + (peer + ctx.rank) % 3 for peer in range(ctx.world)]
    exchanged = funcol.all_to_all_single(inputs[ctx.rank], receive_sizes, send_sizes, group) + 0
    pieces = []
    for peer in range(ctx.world):
        sizes = [3 + (other + peer) % 3 for other in range(ctx.world)]
        start = sum(sizes[: ctx.rank])
        pieces.append(inputs[peer][start : start + sizes[ctx.rank]])
    _equal(ctx, "all_to_all_single", exchanged, torch.cat(pieces))
    _equal(ctx, "the input", own_part, before)


def coalesced(ctx: Context) -> None:
    counts = (5, 1, 17)
    sets = [_parts(ctx, count * ctx.world, call) for call, count in enumerate(counts)]
    own_parts = [parts[ctx.rank] for parts in sets]
    for got, parts in zip(funcol.all_reduce_coalesced(own_parts, "sum", ctx.group), sets, strict=True):
        _equal(ctx, "all_reduce_coalesced", got + 0, sum(parts))
    for got, parts in zip(funcol.all_gather_into_tensor_coalesced(own_parts, ctx.group), sets, strict=True):
        _equal(ctx, "all_gather_into_tensor_coalesced", got + 0, torch.cat(parts))
    scattered = funcol.reduce_scatter_tensor_coalesced(own_parts, "sum", [0] * len(own_parts), ctx.group)
    for got, parts, count in zip(scattered, sets, counts, strict=True):
        wanted = sum(parts)[ctx.rank * count : (ctx.rank + 1) * count]
        _equal(ctx, "reduce_scatter_tensor_coalesced", got + 0, wanted)


def coalesced_in_place(ctx: Context) -> None:
    """dist.all_reduce_coalesced, and the manager without a device, blocking and not."""
    sets = [_parts(ctx, count, call) for call, count in enumerate((5, 1, 17))]
    tensors = [parts[ctx.rank].clone() for parts in sets]
    dist.all_reduce_coalesced(tensors, group=ctx.group)
    for tensor, parts in zip(tensors, sets, strict=True):
        _equal(ctx, "all_reduce_coalesced", tensor, sum(parts))
    for blocking in (True, False):
        tensors = [parts[ctx.rank].clone() for parts in sets]
        with _coalescing_manager(group=ctx.group, async_ops=not blocking) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=ctx.group)
        if not blocking:
            manager.wait()
        for tensor, parts in zip(tensors, sets, strict=True):
            _equal(ctx, f"manager, blocking={blocking}", tensor, sum(parts))
    _managed_gathers(ctx)


def _managed_gathers(ctx: Context) -> None:
    sets = [_parts(ctx, count * ctx.world, call) for call, count in enumerate((4, 9))]
    outputs = [torch.empty(len(parts[0]) * ctx.world) for parts in sets]
    with _coalescing_manager(group=ctx.group):
        for output, parts in zip(outputs, sets, strict=True):
            dist.all_gather_single(output, parts[ctx.rank], group=ctx.group)
    for output, parts in zip(outputs, sets, strict=True):
        _equal(ctx, "manager gather", output, torch.cat(parts))
    outputs = [torch.empty(len(parts[0]) // ctx.world) for parts in sets]
    with _coalescing_manager(group=ctx.group):
        for output, parts in zip(outputs, sets, strict=True):
            dist.reduce_scatter_single(output, parts[ctx.rank].clone(), group=ctx.group)
    for output, parts in zip(outputs, sets, strict=True):
        size = len(output)
        _equal(ctx, "manager scatter", output, sum(parts)[ctx.rank * size : (ctx.rank + 1) * size])


def coalesced_on_a_device(ctx: Context) -> None:
    """The manager given a device (Gloo refuses, and then loses every later operation)."""
    sets = [_parts(ctx, count, call) for call, count in enumerate((5, 1, 17))]
    tensors = [parts[ctx.rank].clone() for parts in sets]
    with _coalescing_manager(group=ctx.group, device=torch.device("cpu")):
        for tensor in tensors:
            dist.all_reduce(tensor, group=ctx.group)
    for tensor, parts in zip(tensors, sets, strict=True):
        _equal(ctx, "manager on a device", tensor, sum(parts))
    tensor = sets[0][ctx.rank].clone()
    dist.all_reduce(tensor, group=ctx.group)
    _equal(ctx, "the next all_reduce", tensor, sum(sets[0]))


def differentiable(ctx: Context) -> None:
    """Gradients through the collectives equal those of one process that holds every rank's input."""
    parts = [part.double() for part in _parts(ctx, 2 * ctx.world, 5, "float64")]
    weights = [
        torch.arange(1.0, 1 + 2 * ctx.world, dtype=torch.float64) * (rank + 1) for rank in range(ctx.world)
    ]

    leaf = parts[ctx.rank].clone().requires_grad_()
    (dist_nn.all_reduce(leaf, group=ctx.group) * weights[ctx.rank]).sum().backward()
    _equal(ctx, "all_reduce gradient", leaf.grad, sum(weights))

    leaf = parts[ctx.rank].clone().requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(leaf, 0, ctx.group)
    scale = torch.arange(gathered.numel(), dtype=torch.float64) + ctx.rank
    (gathered * scale).sum().backward()
    size = leaf.numel()
    summed = sum(torch.arange(size * ctx.world, dtype=torch.float64) + rank for rank in range(ctx.world))
    _equal(ctx, "gather gradient", leaf.grad, summed[ctx.rank * size : (ctx.rank + 1) * size])

    leaf = parts[ctx.rank].clone().requires_grad_()
    scattered = funcol.reduce_scatter_tensor_autograd(leaf, "sum", 0, ctx.group)
    (scattered * (ctx.rank + 1)).sum().backward()
    wanted = torch.arange(1, ctx.world + 1, dtype=torch.float64).repeat_interleave(size // ctx.world)
    _equal(ctx, "scatter gradient", leaf.grad, wanted)

    leaf = parts[ctx.rank].clone().requires_grad_()
    even = [2] * ctx.world
    (funcol.all_to_all_single_autograd(leaf, even, even, ctx.group) * (ctx.rank + 1)).sum().backward()
    _equal(
        ctx, "all_to_all gradient", leaf.grad, torch.arange(1, ctx.world + 1).double().repeat_interleave(2)
    )
