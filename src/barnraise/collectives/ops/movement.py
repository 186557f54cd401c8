"""Data-movement operations: broadcast, all_gather, gather, scatter and all_to_all, cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from barnraise.collectives.ops.chunking import (
    Chunk,
    Copy,
    DenseView,
    chunk_ranges,
    copy_in,
    copy_out,
    cut_blocks,
    no_copy,
    write_back,
)
from barnraise.collectives.ops.operation import Operation
from barnraise.collectives.ops.tensors import check_blocks, element_type_of, split_blocks
from barnraise.core.errors import OperationMismatch


def broadcast(tensor: torch.Tensor, root: int, rank: int) -> Operation:
    element = element_type_of(tensor)
    whole = DenseView.of(tensor)
    flat, is_root = whole.bytes, root == rank
    chunks = []
    for lo, hi in chunk_ranges(flat.numel(), element.size):
        cut = [(flat, lo, hi)]
        fill, drain = (copy_in(cut), no_copy) if is_root else (no_copy, copy_out(cut))
        chunks.append(Chunk((hi - lo,), hi - lo, fill, drain))
    finish = None if is_root else write_back([whole])
    return Operation("broadcast", element, chunks, [tensor], tensor.device, root=root, finish=finish)


def all_gather(
    outputs: Sequence[torch.Tensor], tensor: torch.Tensor, result: list[torch.Tensor], rank: int, world: int
) -> Operation:
    element = element_type_of(tensor)
    check_blocks(outputs, element, world)
    if outputs[rank].numel() != tensor.numel():
        raise OperationMismatch(
            f"all_gather: this rank gives {tensor.numel()} elements, "
            f"its place in the output has {outputs[rank].numel()}"
        )
    own_bytes = DenseView.of(tensor).bytes
    targets = [DenseView.of(output) for output in outputs]
    chunks = []
    for cuts in cut_blocks([target.bytes for target in targets], element.size):
        sizes = tuple(hi - lo for _, lo, hi in cuts)
        _, lo, hi = cuts[rank]
        fill = _copy_at(own_bytes[lo:hi], sum(sizes[:rank]))
        chunks.append(Chunk(sizes, sum(sizes), fill, copy_out(cuts)))
    return Operation("all_gather", element, chunks, result, tensor.device, finish=write_back(targets))


def all_gather_single(output: torch.Tensor, tensor: torch.Tensor, rank: int, world: int) -> Operation:
    return all_gather(split_blocks(output, tensor, world), tensor, [output], rank, world)


def gather(
    outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int, rank: int, world: int
) -> Operation:
    element = element_type_of(tensor)
    own_bytes = DenseView.of(tensor).bytes
    targets: list[DenseView] = []
    if root == rank:
        check_blocks(outputs, element, world, equal=tensor.numel())
        targets = [DenseView.of(output) for output in outputs]
    flats = [target.bytes for target in targets]
    chunks = []
    for lo, hi in chunk_ranges(own_bytes.numel(), element.size, world):
        size = hi - lo
        if root == rank:
            fill = _copy_at(own_bytes[lo:hi], rank * size)
            chunk = Chunk((size,) * world, size * world, fill, copy_out([(flat, lo, hi) for flat in flats]))
        else:
            chunk = Chunk((size,) * world, size, copy_in([(own_bytes, lo, hi)]), no_copy)
        chunks.append(chunk)
    finish = write_back(targets)
    return Operation("gather", element, chunks, list(outputs), tensor.device, root=root, finish=finish)


def scatter(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, rank: int, world: int
) -> Operation:
    element = element_type_of(output)
    target = DenseView.of(output)
    flats: list[torch.Tensor] = []
    if root == rank:
        check_blocks(inputs, element, world, equal=output.numel())
        flats = [DenseView.of(tensor).bytes for tensor in inputs]
    chunks = []
    for lo, hi in chunk_ranges(target.bytes.numel(), element.size, world):
        size = hi - lo
        drained = [(target.bytes, lo, hi)]
        if root == rank:
            fill, drain = copy_in([(flat, lo, hi) for flat in flats]), copy_out(drained, rank * size)
            chunk = Chunk((size,) * world, size * world, fill, drain)
        else:
            chunk = Chunk((size,) * world, size, no_copy, copy_out(drained))
        chunks.append(chunk)
    finish = write_back([target])
    return Operation("scatter", element, chunks, [output], output.device, root=root, finish=finish)


def all_to_all(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    result: list[torch.Tensor],
    rank: int,
    world: int,
) -> Operation:
    """Build an all_to_all operation. Shared memory holds the sent blocks first, then the received blocks."""
    element = element_type_of((*inputs, *outputs)[0])
    check_blocks(inputs, element, world)
    check_blocks(outputs, element, world)
    sources = [DenseView.of(tensor).bytes for tensor in inputs]
    targets = [DenseView.of(output) for output in outputs]
    send = tuple(source.numel() for source in sources)
    receive = tuple(target.bytes.numel() for target in targets)
    if send[rank] != receive[rank]:
        raise OperationMismatch(
            f"all_to_all: this rank keeps {send[rank]} bytes, but expects {receive[rank]} of itself"
        )
    places = [target.bytes for target in targets]

    def drain(view: torch.Tensor) -> None:
        start = sum(send)
        for other_rank, place in enumerate(places):
            arrived = view[start : start + place.numel()]
            place.copy_(sources[rank] if other_rank == rank else arrived)  # this rank's own block is not sent
            start += place.numel()

    fill = copy_in([(source, 0, source.numel()) for source in sources])
    chunk = Chunk((), sum(send) + sum(receive), fill, drain)
    return Operation(
        "all_to_all",
        element,
        [chunk],
        result,
        inputs[0].device,
        splits=(send, receive),
        finish=write_back(targets),
    )


def _copy_at(values: torch.Tensor, start: int) -> Copy:
    return lambda view: view[start : start + values.numel()].copy_(values)
