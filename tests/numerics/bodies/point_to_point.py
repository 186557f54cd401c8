"""Sends and receives: tags out of order, any source, batches, every type."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.numerics.harness import values
from tests.numerics.harness.worker import Context


def _empty(dtype: str, count: int) -> torch.Tensor:
    return torch.zeros(count * values.DTYPES[dtype].itemsize, dtype=torch.uint8).view(values.DTYPES[dtype])


def every_pair(ctx: Context, dtype: str) -> None:
    """Each ordered pair exchanges its own data, blocking on both sides, smaller rank first."""
    for call, size in enumerate((1, 7, 1009)):
        for source in range(ctx.world):
            for target in range(ctx.world):
                if source == target:
                    continue
                data = values.raw_inputs(dtype, size, source, call + 10 * target)
                if ctx.rank == source:
                    dist.send(data, group_dst=target, group=ctx.group)
                elif ctx.rank == target:
                    output = _empty(dtype, size)
                    dist.recv(output, group_src=source, group=ctx.group)
                    good = values.same_bits(output, data)
                    ctx.check(good, f"{dtype} n={size} from {source} to {target}: wrong bytes")


def tags_out_of_order(ctx: Context) -> None:
    """Sent in one order of tags, received in another; the tag decides, not the order."""
    tags = [7, 8, 3, 100]
    right, left = (ctx.rank + 1) % ctx.world, (ctx.rank - 1) % ctx.world
    sends = [
        dist.isend(
            values.raw_inputs("int32", 50 + tag, ctx.rank, tag), group_dst=right, tag=tag, group=ctx.group
        )
        for tag in tags
    ]
    for tag in reversed(tags):
        output = _empty("int32", 50 + tag)
        dist.recv(output, group_src=left, tag=tag, group=ctx.group)
        wanted = values.raw_inputs("int32", 50 + tag, left, tag)
        ctx.check(values.same_bits(output, wanted), f"tag {tag}: wrong bytes")
    for work in sends:
        work.wait()


def same_tag_keeps_order(ctx: Context) -> None:
    """Messages of one pair and tag arrive in the order in which they were sent."""
    right, left = (ctx.rank + 1) % ctx.world, (ctx.rank - 1) % ctx.world
    sends = [
        dist.isend(values.raw_inputs("int64", 33, ctx.rank, call), group_dst=right, group=ctx.group)
        for call in range(6)
    ]
    outputs = [_empty("int64", 33) for _ in range(6)]
    receives = [dist.irecv(output, group_src=left, group=ctx.group) for output in outputs]
    for work in [*sends, *receives]:
        assert work is not None
        work.wait()
    for call, output in enumerate(outputs):
        good = values.same_bits(output, values.raw_inputs("int64", 33, left, call))
        ctx.check(good, f"message {call} is out of order")


def any_source(ctx: Context) -> None:
    """Rank 0 receives from any rank, and checks the reported source."""
    if ctx.rank == 0:
        seen = set()
        for _ in range(ctx.world - 1):
            output = _empty("float64", 21)
            source = dist.recv(output, group=ctx.group, tag=4)
            seen.add(source)
            good = values.same_bits(output, values.raw_inputs("float64", 21, source, 4))
            ctx.check(good, f"recv said {source}, but these are not its bytes")
        ctx.check(seen == set(range(1, ctx.world)), f"heard from {seen}")
    else:
        dist.send(values.raw_inputs("float64", 21, ctx.rank, 4), group_dst=0, group=ctx.group, tag=4)
    dist.barrier(group=ctx.group)


def batch(ctx: Context) -> None:
    """Exchange messages between all pairs in one batch, receives listed before sends."""
    peers = [peer for peer in range(ctx.world) if peer != ctx.rank]
    outputs = {peer: _empty("bfloat16", 61 + peer) for peer in peers}
    operations = [dist.P2POp(dist.irecv, outputs[peer], group_peer=peer, group=ctx.group) for peer in peers]
    for peer in peers:
        data = values.raw_inputs("bfloat16", 61 + ctx.rank, ctx.rank, peer)
        operations.append(dist.P2POp(dist.isend, data, group_peer=peer, group=ctx.group))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for peer in peers:
        wanted = values.raw_inputs("bfloat16", 61 + peer, peer, ctx.rank)
        ctx.check(values.same_bits(outputs[peer], wanted), f"batch: wrong bytes from {peer}")


def large(ctx: Context, megabytes: int) -> None:
    """Both neighbours at once, larger than any socket's buffer."""
    count = megabytes * 262144 + 5
    right, left = (ctx.rank + 1) % ctx.world, (ctx.rank - 1) % ctx.world
    output = _empty("float32", count)
    send = dist.isend(values.raw_inputs("float32", count, ctx.rank, 0), group_dst=right, group=ctx.group)
    dist.recv(output, group_src=left, group=ctx.group)
    assert send is not None
    send.wait()
    ctx.check(values.same_bits(output, values.raw_inputs("float32", count, left, 0)), "wrong bytes")


def strided_receive(ctx: Context) -> None:
    """A column is received into a column, and its neighbours stay as they were."""
    if ctx.rank == 0:
        dist.send(torch.arange(12.0).reshape(4, 3)[:, 1], group_dst=1, group=ctx.group)
    elif ctx.rank == 1:
        whole = torch.full((4, 3), -1.0)
        dist.recv(whole[:, 1], group_src=0, group=ctx.group)
        wanted = torch.full((4, 3), -1.0)
        wanted[:, 1] = torch.tensor([1.0, 4.0, 7.0, 10.0])
        ctx.check(torch.equal(whole, wanted), f"received {whole.tolist()}")
    dist.barrier(group=ctx.group)
