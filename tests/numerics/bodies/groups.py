"""Sub-groups, asynchronous work, and groups used at the same time."""

from __future__ import annotations

import torch
import torch.distributed as dist

from barnraise.collectives import all_reduce_by_leaders
from barnraise.core.errors import CollectiveError, UnsupportedOperation
from tests.numerics.harness import values
from tests.numerics.harness.worker import Context


def _summed(members: list[int], call: int, count: int = 101) -> torch.Tensor:
    return torch.stack([values.inputs("float32", "SUM", count, rank, call) for rank in members]).sum(0)


def sub_groups(ctx: Context) -> None:
    """Groups whose ranks are not the global ones; those outside do nothing and are not waited for."""
    for call, members in enumerate(([1, 3], [0, 2, 4], [4], [1, 2, 3, 4])):
        group = dist.new_group(members)
        if ctx.rank in members:
            ctx.check(dist.get_rank(group) == members.index(ctx.rank), "rank in the sub-group")
            tensor = values.inputs("float32", "SUM", 101, ctx.rank, call)
            dist.all_reduce(tensor, group=group)
            ctx.check(torch.equal(tensor, _summed(members, call)), f"all_reduce in {members}")
            tensor = values.inputs("float32", "SUM", 101, ctx.rank, call)
            dist.broadcast(tensor, src=members[-1], group=group)
            wanted = values.inputs("float32", "SUM", 101, members[-1], call)
            ctx.check(torch.equal(tensor, wanted), f"broadcast in {members}")
            outputs = [torch.zeros(5) for _ in members]
            dist.all_gather(outputs, torch.full((5,), float(ctx.rank)), group=group)
            ctx.check([int(o[0]) for o in outputs] == members, f"all_gather in {members}")
            dist.destroy_process_group(group)
    dist.barrier(group=ctx.group)


def enumerated(ctx: Context) -> None:
    own_group, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2, 4]])
    members = [0, 3] if ctx.rank in (0, 3) else [1, 2, 4]
    tensor = values.inputs("float32", "SUM", 101, ctx.rank, 9)
    dist.all_reduce(tensor, group=own_group)
    ctx.check(torch.equal(tensor, _summed(members, 9)), f"all_reduce in {members}")


def interleaved(ctx: Context) -> None:
    """Two groups of the same ranks, both with operations in flight, waited for in the other order."""
    other = dist.new_group(list(range(ctx.world)))
    first = [values.inputs("float32", "SUM", 4099, ctx.rank, call) for call in range(4)]
    second = [values.inputs("float32", "SUM", 4099, ctx.rank, 100 + call) for call in range(4)]
    works = []
    for first_tensor, second_tensor in zip(first, second, strict=True):
        works.append(dist.all_reduce(first_tensor, group=ctx.group, async_op=True))
        works.append(dist.all_reduce(second_tensor, group=other, async_op=True))
    for work in reversed(works):
        work.wait()
    members = list(range(ctx.world))
    for call in range(4):
        ctx.check(torch.equal(first[call], _summed(members, call, 4099)), f"first group, call {call}")
        ctx.check(torch.equal(second[call], _summed(members, 100 + call, 4099)), f"second group, call {call}")
    dist.destroy_process_group(other)


def futures(ctx: Context) -> None:
    """async_op with get_future().then(...): the callback sees the reduced tensor."""
    members = list(range(ctx.world))
    tensor = values.inputs("float32", "SUM", 5003, ctx.rank, 1)
    work = dist.all_reduce(tensor, group=ctx.group, async_op=True)
    chained = work.get_future().then(lambda future: _first(future.value()) * 2)
    ctx.check(torch.equal(chained.wait(), _summed(members, 1, 5003) * 2), "then() saw other numbers")
    work.wait()
    ctx.check(work.is_completed(), "is_completed() after wait()")
    tensors = [values.inputs("float32", "SUM", 17, ctx.rank, call) for call in range(3)]
    pending = [dist.all_reduce(tensor, group=ctx.group, async_op=True).get_future() for tensor in tensors]
    torch.futures.collect_all(pending).wait()
    for call, tensor in enumerate(tensors):
        ctx.check(torch.equal(tensor, _summed(members, call, 17)), f"collect_all, call {call}")
    output = torch.empty(7 * ctx.world)
    work = dist.all_gather_single(output, torch.full((7,), float(ctx.rank)), group=ctx.group, async_op=True)
    work.wait()
    wanted = torch.arange(float(ctx.world)).repeat_interleave(7)
    ctx.check(torch.equal(output, wanted), "asynchronous all_gather")
    dist.barrier(group=ctx.group, async_op=True).wait()


def _first(value: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def many_kinds_in_flight(ctx: Context) -> None:
    """Unlike operations issued without waiting, in one order on every rank."""
    world, rank, group = ctx.world, ctx.rank, ctx.group
    members = list(range(world))
    summed = values.inputs("float32", "SUM", 2003, rank, 0)
    sent = values.inputs("float32", "SUM", 301, rank, 1)
    gathered = torch.empty(world * 5)
    works = [
        dist.all_reduce(summed, group=group, async_op=True),
        dist.broadcast(sent, group_src=world - 1, group=group, async_op=True),
        dist.all_gather_single(gathered, torch.full((5,), float(rank)), group=group, async_op=True),
        dist.barrier(group=group, async_op=True),
    ]
    scattered = torch.empty(11)
    whole = values.inputs("float32", "SUM", 11 * world, rank, 2)
    works.append(dist.reduce_scatter_single(scattered, whole, group=group, async_op=True))
    for work in works:
        work.wait()
    ctx.check(torch.equal(summed, _summed(members, 0, 2003)), "all_reduce")
    ctx.check(torch.equal(sent, values.inputs("float32", "SUM", 301, world - 1, 1)), "broadcast")
    ctx.check(torch.equal(gathered, torch.arange(float(world)).repeat_interleave(5)), "all_gather")
    wanted = _summed(members, 2, 11 * world)[rank * 11 : (rank + 1) * 11]
    ctx.check(torch.equal(scattered, wanted), "reduce_scatter")


def by_leaders(ctx: Context) -> str:
    """Gloo inside two machines, ours between their leaders; then one leader has given its group up."""
    machines = [[0, 1, 2], [3, 4]]
    inside = [dist.new_group(ranks, backend="gloo") for ranks in machines][ctx.rank > 2]
    across = dist.new_group([ranks[0] for ranks in machines])
    leads = dist.get_rank(inside) == 0
    for call, operation in enumerate(("SUM", "MAX", "PRODUCT")):
        tensor = values.inputs("float32", operation, 4099, ctx.rank, call)
        op = getattr(dist.ReduceOp, operation)
        all_reduce_by_leaders(tensor, inside, across if leads else None, op)
        wanted = values.inputs("float32", operation, 4099, ctx.rank, call)
        dist.all_reduce(wanted, op=op, group=ctx.group)
        ctx.check(values.same_bits(tensor, wanted), f"{operation} by leaders differs from that of one group")
    if ctx.rank == 3:
        across.abort()
    try:
        all_reduce_by_leaders(torch.ones(5), inside, across if leads else None)
        outcome = "no error"
    except CollectiveError as error:
        outcome = f"{type(error).__name__}: {error.message}"
    dist.barrier(group=ctx.group)
    dist.destroy_process_group(inside)
    if leads:
        dist.destroy_process_group(across)
    return outcome


def refused_by_leaders(ctx: Context) -> None:
    for op, across in ((dist.ReduceOp.AVG, ctx.group), (dist.ReduceOp.SUM, None)):
        refusal = ""
        try:
            all_reduce_by_leaders(torch.ones(5), ctx.group, across, op)
        except UnsupportedOperation as error:
            refusal = str(error)
        ctx.check(bool(refusal), f"{op} with {across} was accepted")
