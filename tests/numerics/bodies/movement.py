"""Collectives that only move data: any bits of any type must arrive, from the right rank, in its place."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.numerics.harness import values
from tests.numerics.harness.expectations import RAISES, RIGHT, movement, uneven_lists
from tests.numerics.harness.worker import Context

SIZES = (0, 1, 7, 31, 1009)


def _allowed(ctx: Context, dtype: str, label: str, body: Callable[[], None]) -> None:
    expected = movement(ctx.backend, dtype, label)
    if expected == RIGHT:
        body()
        return
    try:
        body()
    except Exception as error:
        ctx.check(len(str(error)) > 10, f"{label} {dtype}: an error without a sentence")
    else:
        ctx.check(expected != RAISES, f"{label} {dtype}: did not raise")


def _empty(dtype: str, count: int) -> torch.Tensor:
    return (
        torch.zeros(count, dtype=torch.uint8).repeat(values.DTYPES[dtype].itemsize).view(values.DTYPES[dtype])
    )


def _arrived(ctx: Context, label: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    ctx.check(values.same_bits(got, wanted), f"{label} {got.dtype} n={wanted.numel()}: wrong bytes arrived")


def broadcast(ctx: Context, dtype: str) -> None:
    def body() -> None:
        for root in range(ctx.world):
            for call, size in enumerate(SIZES):
                wanted = values.raw_inputs(dtype, size, root, call)
                tensor = values.raw_inputs(dtype, size, ctx.rank, call)
                dist.broadcast(tensor, group_src=root, group=ctx.group)
                _arrived(ctx, f"broadcast from {root}", tensor, wanted)

    _allowed(ctx, dtype, "broadcast", body)


def all_gather(ctx: Context, dtype: str) -> None:
    def body() -> None:
        for call, size in enumerate(SIZES):
            outputs = [_empty(dtype, size) for _ in range(ctx.world)]
            dist.all_gather(outputs, values.raw_inputs(dtype, size, ctx.rank, call), group=ctx.group)
            for rank, output in enumerate(outputs):
                _arrived(ctx, f"all_gather from {rank}", output, values.raw_inputs(dtype, size, rank, call))

    _allowed(ctx, dtype, "all_gather", body)


def all_gather_uneven(ctx: Context, dtype: str) -> None:
    for call, sizes in enumerate(
        ([5 * r for r in range(ctx.world)], [97 - 13 * r for r in range(ctx.world)])
    ):
        outputs = [_empty(dtype, size) for size in sizes]
        dist.all_gather(outputs, values.raw_inputs(dtype, sizes[ctx.rank], ctx.rank, call), group=ctx.group)
        for rank, output in enumerate(outputs):
            wanted = values.raw_inputs(dtype, sizes[rank], rank, call)
            _arrived(ctx, f"uneven all_gather from {rank}", output, wanted)


def all_gather_into_tensor(ctx: Context, dtype: str) -> None:
    def body() -> None:
        for call, size in enumerate(SIZES):
            parts = [values.raw_inputs(dtype, size, rank, call) for rank in range(ctx.world)]
            output = _empty(dtype, size * ctx.world)
            dist.all_gather_single(output, parts[ctx.rank], group=ctx.group)
            for rank in range(ctx.world):
                piece = output[rank * size : (rank + 1) * size]
                _arrived(ctx, f"all_gather_into_tensor from {rank}", piece, parts[rank])

    _allowed(ctx, dtype, "all_gather_into_tensor", body)


def gather(ctx: Context, dtype: str) -> None:
    def body() -> None:
        for root in range(ctx.world):
            for call, size in enumerate(SIZES):
                outputs = [_empty(dtype, size) for _ in range(ctx.world)] if ctx.rank == root else None
                tensor = values.raw_inputs(dtype, size, ctx.rank, call + 10 * root)
                dist.gather(tensor, outputs, group_dst=root, group=ctx.group)
                for rank, output in enumerate(outputs or []):
                    wanted = values.raw_inputs(dtype, size, rank, call + 10 * root)
                    _arrived(ctx, f"gather from {rank} to {root}", output, wanted)

    _allowed(ctx, dtype, "gather", body)


def scatter(ctx: Context, dtype: str) -> None:
    def body() -> None:
        for root in range(ctx.world):
            for call, size in enumerate(SIZES):
                pieces = [values.raw_inputs(dtype, size, rank, call + 10 * root) for rank in range(ctx.world)]
                output = _empty(dtype, size)
                dist.scatter(output, pieces if ctx.rank == root else None, group_src=root, group=ctx.group)
                _arrived(ctx, f"scatter from {root}", output, pieces[ctx.rank])

    _allowed(ctx, dtype, "scatter", body)


def _pair_size(source: int, target: int, base: int, uneven: bool = True) -> int:
    """Uneven, with some empty: a different size for each ordered pair."""
    if not uneven:
        return base
    return (base + 7 * source + 3 * target) if (source + target) % 3 or base > 50 else 0


def all_to_all(ctx: Context, dtype: str) -> None:
    def body() -> None:
        uneven = uneven_lists(ctx.backend)
        for call, base in enumerate((0, 11, 101)):
            sends = [
                values.raw_inputs(dtype, _pair_size(ctx.rank, peer, base, uneven), ctx.rank, call + 10 * peer)
                for peer in range(ctx.world)
            ]
            receive_sizes = [_pair_size(peer, ctx.rank, base, uneven) for peer in range(ctx.world)]
            outputs = [_empty(dtype, size) for size in receive_sizes]
            dist.all_to_all(outputs, sends, group=ctx.group)
            for peer, output in enumerate(outputs):
                wanted = values.raw_inputs(dtype, receive_sizes[peer], peer, call + 10 * ctx.rank)
                _arrived(ctx, f"all_to_all from {peer}", output, wanted)

    _allowed(ctx, dtype, "all_to_all", body)


def all_to_all_single(ctx: Context, dtype: str) -> None:
    def body() -> None:
        for call, base in enumerate((0, 11, 101)):
            send_sizes = [_pair_size(ctx.rank, peer, base) for peer in range(ctx.world)]
            receive_sizes = [_pair_size(peer, ctx.rank, base) for peer in range(ctx.world)]
            sends = [
                values.raw_inputs(dtype, n, ctx.rank, call + 10 * peer) for peer, n in enumerate(send_sizes)
            ]
            output = _empty(dtype, sum(receive_sizes))
            dist.all_to_all_single(output, _joined(sends, dtype), receive_sizes, send_sizes, group=ctx.group)
            wanted = [
                values.raw_inputs(dtype, n, peer, call + 10 * ctx.rank)
                for peer, n in enumerate(receive_sizes)
            ]
            _arrived(ctx, "uneven all_to_all_single", output, _joined(wanted, dtype))
        for call, size in enumerate(SIZES):
            inputs = [values.raw_inputs(dtype, size * ctx.world, rank, call) for rank in range(ctx.world)]
            output = _empty(dtype, size * ctx.world)
            dist.all_to_all_single(output, inputs[ctx.rank], group=ctx.group)
            own_slice = slice(ctx.rank * size, (ctx.rank + 1) * size)
            _arrived(
                ctx,
                "even all_to_all_single",
                output,
                _joined([tensor[own_slice] for tensor in inputs], dtype),
            )

    _allowed(ctx, dtype, "all_to_all_single", body)


def _joined(pieces: list[torch.Tensor], dtype: str) -> torch.Tensor:
    """torch.cat for types that it does not know."""
    parts = [piece.contiguous().view(torch.uint8) for piece in pieces]
    return torch.cat(parts).view(values.DTYPES[dtype])


def large(ctx: Context, megabytes: int) -> None:
    """Sizes at which chunks, segments and several frames matter."""
    count = megabytes * 1024 * 1024 // 4 + 3
    for root in range(ctx.world):
        tensor = values.raw_inputs("float32", count, ctx.rank, root)
        dist.broadcast(tensor, group_src=root, group=ctx.group)
        _arrived(ctx, f"large broadcast from {root}", tensor, values.raw_inputs("float32", count, root, root))
    piece = count // ctx.world + 1
    outputs = [_empty("float32", piece) for _ in range(ctx.world)]
    dist.all_gather(outputs, values.raw_inputs("float32", piece, ctx.rank, 20), group=ctx.group)
    for rank, output in enumerate(outputs):
        _arrived(ctx, f"large all_gather from {rank}", output, values.raw_inputs("float32", piece, rank, 20))
    inputs = [values.raw_inputs("float32", piece * ctx.world, rank, 21) for rank in range(ctx.world)]
    output = _empty("float32", piece * ctx.world)
    dist.all_to_all_single(output, inputs[ctx.rank], group=ctx.group)
    wanted = torch.cat([tensor[ctx.rank * piece : (ctx.rank + 1) * piece] for tensor in inputs])
    _arrived(ctx, "large all_to_all_single", output, wanted)


def barrier(ctx: Context) -> None:
    """Check that no rank leaves early, by a file that the last rank writes before it enters."""
    mark = ctx.scratch / f"barrier-{ctx.backend}-{ctx.world}"
    for turn in range(ctx.world):
        path = mark.with_name(f"{mark.name}-{turn}")
        if ctx.rank == turn:
            path.write_text("here")
        dist.barrier(group=ctx.group)
        ctx.check(path.exists(), f"left the barrier before rank {turn} entered it")
        dist.barrier(group=ctx.group)
        if ctx.rank == turn:
            path.unlink()
