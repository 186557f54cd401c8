"""Distributed checkpoints: saved by four ranks, loaded by two."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.numerics.bodies.sharding import mesh_of
from tests.numerics.harness import values
from tests.numerics.harness.worker import Context


def _state(world: int, seed: int) -> dict[str, object]:
    mesh = mesh_of((world,), ("shard",))
    state: dict[str, object] = {"step": torch.tensor(seed), "note": f"step {seed}"}
    for call, (name, placement) in enumerate(
        (("rows", Shard(0)), ("columns", Shard(1)), ("copies", Replicate()))
    ):
        whole = values.inputs("float32", "SUM", 23 * 10, seed, call).reshape(23, 10)
        state[name] = distribute_tensor(whole, mesh, [placement])
    return state


def save(ctx: Context, directory: str, seed: int, asynchronous: bool) -> None:
    """Runs on all five, since a mesh is made; the first four save."""
    group = _four(ctx)
    mesh = mesh_of((4,), ("shard",))
    if mesh.get_coordinate() is None:
        return
    path = ctx.scratch / directory
    state = _state(4, seed)
    if asynchronous:
        future = dcp.async_save(state, checkpoint_id=path, process_group=group)
        for value in state.values():  # training goes on while it is written
            if isinstance(value, DTensor):
                value.to_local().add_(1000)
        future.result()
    else:
        dcp.save(state, checkpoint_id=path, process_group=group)


_FOUR: list[dist.ProcessGroup] = []


def _four(ctx: Context) -> dist.ProcessGroup:
    if not _FOUR:
        _FOUR.append(dist.new_group([0, 1, 2, 3]))
    return _FOUR[0]


_TWO: list[dist.ProcessGroup] = []


def load(ctx: Context, directory: str, seed: int) -> None:
    """Two ranks read what four wrote."""
    if not _TWO:
        _TWO.append(dist.new_group([0, 1]))
    mesh = mesh_of((2,), ("shard",))
    if mesh.get_coordinate() is None:
        return
    path: Path = ctx.scratch / directory
    state = _state(2, seed + 50)
    right = _state(2, seed)
    dcp.load(state, checkpoint_id=path, process_group=_TWO[0])
    for name in ("rows", "columns", "copies"):
        got, wanted = state[name], right[name]
        assert isinstance(got, DTensor)
        assert isinstance(wanted, DTensor)
        ctx.check(torch.equal(got.full_tensor(), wanted.full_tensor()), f"{name} was not restored")
    step = state["step"]
    assert isinstance(step, torch.Tensor)
    ctx.check(int(step) == seed, f"step is {step}")
    ctx.check(state["note"] == f"step {seed}", f"note is {state['note']}")
