"""Reduction operations: all_reduce, reduce and reduce_scatter, cut into chunks.

torch's ``ReduceOp`` becomes a reduction of the communication process, with a scaling before or after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.distributed as dist

from barnraise.collectives.comm_process.arithmetic import supported
from barnraise.collectives.ops.chunking import (
    Chunk,
    Cut,
    DenseView,
    Finish,
    chunk_ranges,
    cut_blocks,
    no_copy,
    write_back,
)
from barnraise.collectives.ops.dtypes import ElementType
from barnraise.collectives.ops.operation import Operation
from barnraise.collectives.ops.tensors import check_blocks, element_type_of
from barnraise.core.errors import OperationMismatch, UnsupportedOperation

_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of the communication process with its scaling.

    ``before`` multiplies the input, ``divide`` divides the result.
    """

    name: str
    before: float | torch.Tensor | None = None
    divide: int = 1

    def fill(self, staged: torch.Tensor, values: torch.Tensor) -> None:
        if self.before is None:
            staged.copy_(values)
            return
        factor = self.before.to(values.device) if isinstance(self.before, torch.Tensor) else self.before
        # torch cannot multiply eight-bit floats
        wide = values.to(torch.float32) if values.element_size() == 1 else values
        staged.copy_(wide * factor)

    def drain(self, staged: torch.Tensor, values: torch.Tensor) -> None:
        if self.divide != 1:
            exact = staged.is_floating_point() or staged.is_complex()
            staged.div_(self.divide, rounding_mode=None if exact else "trunc")
        values.copy_(staged)


def reduction_of(op: dist.ReduceOp, element: ElementType, world: int) -> Reduction:
    """Translate a ``ReduceOp`` of torch. Raise UnsupportedOperation if the element type does not have it."""
    kind = op.op if hasattr(op, "op") else op
    if kind == dist.ReduceOp.PREMUL_SUM:
        if element.kind not in ("float", "complex"):
            raise UnsupportedOperation(f"PREMUL_SUM does not exist for {element.name}")
        _, factor = cast(tuple[object, float | torch.Tensor], op.__getstate__())
        return Reduction("sum", before=factor)
    return _without_factor(kind, element, world)


@cache
def _without_factor(kind: object, element: ElementType, world: int) -> Reduction:
    if kind == dist.ReduceOp.AVG:
        # As in NCCL: Lightning averages counts unless the backend is called gloo.
        if element.kind not in ("float", "complex") and element.name not in ("int32", "int64"):
            raise UnsupportedOperation(
                f"AVG does not exist for {element.name}",
                hint="Use SUM and divide, or convert to a float or a wider integer type.",
            )
        # narrow floats would overflow in the sum: divide first
        narrow = element.name == "float16" or element.name.startswith("float8")
        return Reduction("sum", before=1.0 / world) if narrow else Reduction("sum", divide=world)
    name = next((name for known, name in _NAMES.items() if kind == known), None)
    if name is None or not supported(element.code, name):
        raise UnsupportedOperation(f"{kind} does not exist for {element.name}")
    return Reduction(name)


def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp, world: int) -> Operation:
    target = DenseView.of(tensor)
    return _whole("all_reduce", target, op, world, [tensor], write_back([target]))


def all_reduce_coalesced(tensors: Sequence[torch.Tensor], op: dist.ReduceOp, world: int) -> Operation:
    """Build one all_reduce over all tensors, concatenated."""
    element = element_type_of(tensors[0])
    if any(element_type_of(tensor) != element for tensor in tensors):
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
    element = element_type_of(target.values)
    reduction = reduction_of(op, element, world)
    flat = target.flat
    chunks = [
        _whole_chunk(flat[lo // element.size : hi // element.size], reduction, keep=keep)
        for lo, hi in chunk_ranges(flat.numel() * element.size, element.size)
    ]
    return Operation(
        kind, element, chunks, result, flat.device, reduction=reduction.name, root=root, finish=finish
    )


def _whole_chunk(values: torch.Tensor, reduction: Reduction, *, keep: bool) -> Chunk:
    nbytes = values.numel() * values.element_size()
    dtype = values.dtype

    def fill(view: torch.Tensor) -> None:
        reduction.fill(view.view(dtype), values)

    def drain(view: torch.Tensor) -> None:
        reduction.drain(view.view(dtype), values)

    return Chunk((nbytes,), nbytes, fill, drain if keep else no_copy)


def reduce_scatter(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], op: dist.ReduceOp, rank: int, world: int
) -> Operation:
    element = element_type_of(output)
    reduction = reduction_of(op, element, world)
    check_blocks(inputs, element, world)
    if inputs[rank].numel() != output.numel():
        raise OperationMismatch(
            f"reduce_scatter: the output has {output.numel()} elements, "
            f"this rank's input block {inputs[rank].numel()}"
        )
    flats = [block.data.reshape(-1) for block in inputs]
    target = DenseView.of(output)
    chunks = [
        _scattered_chunk(cuts, rank, element, reduction, target.flat)
        for cuts in cut_blocks(flats, element.size)
    ]
    return Operation(
        "reduce_scatter",
        element,
        chunks,
        [output],
        output.device,
        reduction=reduction.name,
        finish=write_back([target]),
    )


def _scattered_chunk(
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
