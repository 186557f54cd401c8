"""Operations that combine the ranks' values: all_reduce, reduce and reduce_scatter as calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from barnraise.collectives.ops.chunking import (
    Chunk,
    Cut,
    DenseView,
    Finish,
    cut_blocks,
    nothing,
    ranges,
    write_back,
)
from barnraise.collectives.ops.dtypes import ElementType
from barnraise.collectives.ops.operation import Operation
from barnraise.collectives.ops.reduce_ops import Reduction, reduction_of
from barnraise.collectives.ops.tensors import check_blocks, element_of
from barnraise.core.errors import OperationMismatch, UnsupportedOperation


def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp, world: int) -> Operation:
    target = DenseView.of(tensor)
    return _whole("all_reduce", target, op, world, [tensor], write_back([target]))


def all_reduce_coalesced(tensors: Sequence[torch.Tensor], op: dist.ReduceOp, world: int) -> Operation:
    """One operation for all tensors, as they lie one behind the other."""
    element = element_of(tensors[0])
    if any(element_of(tensor) != element for tensor in tensors):
        raise UnsupportedOperation(
            "coalesced tensors must have one dtype", hint="Coalesce tensors of each dtype apart."
        )
    flat = torch.cat([tensor.data.reshape(-1) for tensor in tensors])

    def finish() -> None:
        start = 0
        for tensor in tensors:
            tensor.data.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()

    return _whole("all_reduce", DenseView(flat, flat, False), op, world, list(tensors), finish)


def reduce(tensor: torch.Tensor, op: dist.ReduceOp, root: int, rank: int, world: int) -> Operation:
    target = DenseView.of(tensor)
    finish = write_back([target]) if rank == root else None
    return _whole("reduce", target, op, world, [tensor], finish, root=root, keep=rank == root)


def _whole(
    kind: str,
    target: DenseView,
    op: dist.ReduceOp,
    world: int,
    result: list[torch.Tensor],
    finish: Finish | None,
    *,
    root: int = -1,
    keep: bool = True,
) -> Operation:
    element = element_of(target.values)
    reduction = reduction_of(op, element, world)
    flat = target.flat
    pieces = [
        _whole_piece(flat[lo // element.size : hi // element.size], reduction, keep=keep)
        for lo, hi in ranges(flat.numel() * element.size, element.size)
    ]
    return Operation(
        kind, element, pieces, result, flat.device, reduction=reduction.name, root=root, finish=finish
    )


def _whole_piece(values: torch.Tensor, reduction: Reduction, *, keep: bool) -> Chunk:
    nbytes = values.numel() * values.element_size()
    dtype = values.dtype

    def fill(view: torch.Tensor) -> None:
        reduction.fill(view.view(dtype), values)

    def drain(view: torch.Tensor) -> None:
        reduction.drain(view.view(dtype), values)

    return Chunk((nbytes,), nbytes, fill, drain if keep else nothing)


def reduce_scatter(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], op: dist.ReduceOp, rank: int, world: int
) -> Operation:
    element = element_of(output)
    reduction = reduction_of(op, element, world)
    check_blocks(inputs, element, world)
    if inputs[rank].numel() != output.numel():
        raise OperationMismatch(
            f"reduce_scatter: the output has {output.numel()} elements, "
            f"this rank's input block {inputs[rank].numel()}"
        )
    flats = [block.data.reshape(-1) for block in inputs]
    target = DenseView.of(output)
    pieces = [
        _scattered_piece(cuts, rank, element, reduction, target.flat)
        for cuts in cut_blocks(flats, element.size)
    ]
    return Operation(
        "reduce_scatter",
        element,
        pieces,
        [output],
        output.device,
        reduction=reduction.name,
        finish=write_back([target]),
    )


def _scattered_piece(
    cuts: Sequence[Cut], rank: int, element: ElementType, reduction: Reduction, target: torch.Tensor
) -> Chunk:
    sizes = tuple((hi - lo) * element.size for _, lo, hi in cuts)
    start = sum(sizes[:rank])

    def fill(view: torch.Tensor) -> None:
        offset = 0
        for (flat, lo, hi), size in zip(cuts, sizes, strict=True):
            reduction.fill(view[offset : offset + size].view(target.dtype), flat[lo:hi])
            offset += size

    def drain(view: torch.Tensor) -> None:
        _, lo, hi = cuts[rank]
        reduction.drain(view[start : start + sizes[rank]].view(target.dtype), target[lo:hi])

    return Chunk(sizes, sum(sizes), fill, drain)
