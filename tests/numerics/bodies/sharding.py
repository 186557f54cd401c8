"""FSDP2, hybrid sharding, tensor parallelism and DTensor against one process.

These run on all five ranks: every rank must take part in making a mesh, those outside it then do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.numerics.bodies.training import RATE, STEPS, batch_of, loss_of, model_of
from tests.numerics.harness import values
from tests.numerics.harness.worker import Context

_MESHES: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over the first ranks, made once per worker: groups are kept, as programs keep them."""
    key = (shape, names)
    if key not in _MESHES:
        count = int(torch.tensor(shape).prod())
        _MESHES[key] = DeviceMesh("cpu", torch.arange(count).reshape(shape), mesh_dim_names=names)
    return _MESHES[key]


def _outside(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _near(ctx: Context, label: str, model: nn.Module, right: nn.Module, tolerance: float) -> str:
    parts = []
    for (name, got), wanted in zip(model.named_parameters(), right.parameters(), strict=True):
        full = _whole(got).detach()
        gap = (full.double() - wanted.double()).abs().max().item()
        ctx.check(gap <= tolerance, f"{label}: {name} is off by {gap:.3g}, more than {tolerance:g}")
        parts.append(full.reshape(-1))
    return values.digest(torch.cat(parts))


def _reference(batches: int, momentum: float = 0.9) -> nn.Module:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch_of(rank, step) for rank in range(batches)])).backward()
        optimizer.step()
    return model


def _sharded(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = model_of()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _train(model: nn.Module, part: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch_of(part, step)).backward()
        optimizer.step()


def fsdp(ctx: Context, sharded_over: int, reshard: bool = True) -> str | None:
    mesh = mesh_of((sharded_over,), ("shard",))
    if _outside(mesh):
        return None
    model = _sharded(mesh, reshard_after_forward=reshard)
    _train(model, ctx.rank)
    return _near(ctx, f"FSDP2 on {sharded_over}", model, _reference(sharded_over), 1e-12)


def hsdp(ctx: Context) -> str | None:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    if _outside(mesh):
        return None
    model = _sharded(mesh)
    _train(model, ctx.rank)
    return _near(ctx, "HSDP 2x2", model, _reference(4), 1e-12)


def fsdp_bfloat16(ctx: Context) -> str | None:
    """bfloat16 parameters on the wire, float32 reduction: close to the exact reference."""
    mesh = mesh_of((4,), ("shard",))
    if _outside(mesh):
        return None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(mesh, mp_policy=policy)
    _train(model, ctx.rank)
    return _near(ctx, "FSDP2 bfloat16", model, _reference(4), 3e-2)


def fsdp_accumulated_and_clipped(ctx: Context) -> str | None:
    mesh = mesh_of((4,), ("shard",))
    if _outside(mesh):
        return None
    model, right = _sharded(mesh), model_of()
    optimizers = [torch.optim.SGD(each.parameters(), lr=RATE) for each in (model, right)]
    for step in range(2):
        for half in range(2):
            model.set_requires_gradient_sync(half == 1)
            loss_of(model, batch_of(ctx.rank, 2 * step + half)).backward()
            together = torch.cat([batch_of(rank, 2 * step + half) for rank in range(4)])
            loss_of(right, together).backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, right)]
        gap = abs(_whole(norms[0]).item() - norms[1].item())
        ctx.check(gap < 1e-12, f"gradient norms differ by {gap:g}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _near(ctx, "FSDP2 accumulated and clipped", model, right, 1e-12)


def tensor_parallel(ctx: Context, sharded_over: int) -> str | None:
    mesh = mesh_of((sharded_over,), ("tensor",))
    if _outside(mesh):
        return None
    model = model_of(width=40)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    right = model_of(width=40)
    optimizers = [torch.optim.SGD(each.parameters(), lr=RATE) for each in (model, right)]
    for step in range(STEPS):
        for each, optimizer in zip((model, right), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each, batch_of(0, step)).backward()
            optimizer.step()
    return _near(ctx, f"tensor parallel on {sharded_over}", model, right, 1e-12)


def fsdp_with_tensor_parallel(ctx: Context) -> str | None:
    mesh = mesh_of((2, 2), ("data", "tensor"))
    if _outside(mesh):
        return None
    model = model_of(width=40)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    _train(model, mesh.get_local_rank("data"))
    right = model_of(width=40)
    optimizer = torch.optim.SGD(right.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(right, torch.cat([batch_of(part, step) for part in range(2)])).backward()
        optimizer.step()
    return _near(ctx, "FSDP2 x tensor parallel", model, right, 1e-12)


def redistribute(ctx: Context, shape: list[int]) -> None:
    """From every placement to every placement, with shards that do not divide evenly."""
    names = ("a", "b")[: len(shape)]
    mesh = mesh_of(tuple(shape), names)
    if _outside(mesh):
        return
    whole = values.inputs("float64", "SUM", 7 * 9, 0, 3).reshape(7, 9)
    singles: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    layouts = [[placement] for placement in singles]
    if len(shape) == 2:
        layouts = [[first, second] for first in singles for second in singles]
    for start in layouts:
        for end in layouts:
            tensor = distribute_tensor(whole, mesh, start)
            moved = tensor.redistribute(mesh, end)
            right = distribute_tensor(whole, mesh, end).to_local()
            ctx.check(torch.equal(moved.to_local(), right), f"{start} -> {end} on {shape}")
            ctx.check(torch.equal(moved.full_tensor(), whole), f"{start} -> {end} -> whole on {shape}")


def partial(ctx: Context, sharded_over: int) -> None:
    """Sums that are still to be made become shards (reduce_scatter) or copies (all_reduce)."""
    mesh = mesh_of((sharded_over,), ("a",))
    if _outside(mesh):
        return
    parts = [values.inputs("float64", "SUM", 7 * 9, rank, 4).reshape(7, 9) for rank in range(sharded_over)]
    for operation, right in (
        ("sum", torch.stack(parts).sum(0)),
        ("max", torch.stack(parts).amax(0)),
        ("avg", torch.stack(parts).mean(0)),
    ):
        for end in (Replicate(), Shard(0), Shard(1)):
            tensor = DTensor.from_local(parts[ctx.rank], mesh, [Partial(operation)], run_check=False)
            got = tensor.redistribute(mesh, [end]).full_tensor()
            gap = (got - right).abs().max().item()
            ctx.check(gap <= 1e-6 * (operation == "avg"), f"Partial({operation}) -> {end} is off by {gap:g}")


def mesh_groups(ctx: Context) -> None:
    """The groups inside a 2-D mesh are those of its rows and columns."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    if _outside(mesh):
        return
    for name, members in (
        ("shard", [ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1]),
        ("replicate", [ctx.rank % 2, ctx.rank % 2 + 2]),
    ):
        tensor = torch.tensor([float(ctx.rank)])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        ctx.check(tensor.item() == sum(members), f"group {name} has other members")
