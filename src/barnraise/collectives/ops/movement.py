"""Operations that only move values: broadcast, all_gather, gather, scatter and all_to_all as calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from barnraise.collectives.ops.chunking import (
    Chunk,
    Copy,
    DenseView,
    copy_in,
    copy_out,
    cut_blocks,
    nothing,
    ranges,
    write_back,
)
from barnraise.collectives.ops.operation import Operation
from barnraise.collectives.ops.tensors import blocks_of, check_blocks, element_of
from barnraise.core.errors import OperationMismatch


def broadcast(tensor: torch.Tensor, root: int, rank: int) -> Operation:
    element = element_of(tensor)
    whole = DenseView.of(tensor)
    flat, mine = whole.bytes, root == rank
    pieces = []
    for lo, hi in ranges(flat.numel(), element.size):
        cut = [(flat, lo, hi)]
        fill, drain = (copy_in(cut), nothing) if mine else (nothing, copy_out(cut))
        pieces.append(Chunk((hi - lo,), hi - lo, fill, drain))
    finish = None if mine else write_back([whole])
    return Operation("broadcast", element, pieces, [tensor], tensor.device, root=root, finish=finish)


def all_gather(
    outputs: Sequence[torch.Tensor], tensor: torch.Tensor, result: list[torch.Tensor], rank: int, world: int
) -> Operation:
    element = element_of(tensor)
    check_blocks(outputs, element, world)
    if outputs[rank].numel() != tensor.numel():
        raise OperationMismatch(
            f"all_gather: this rank gives {tensor.numel()} elements, "
            f"its place in the output has {outputs[rank].numel()}"
        )
    mine = DenseView.of(tensor).bytes
    targets = [DenseView.of(output) for output in outputs]
    pieces = []
    for cuts in cut_blocks([target.bytes for target in targets], element.size):
        sizes = tuple(hi - lo for _, lo, hi in cuts)
        _, lo, hi = cuts[rank]
        fill = _copy_at(mine[lo:hi], sum(sizes[:rank]))
        pieces.append(Chunk(sizes, sum(sizes), fill, copy_out(cuts)))
    return Operation("all_gather", element, pieces, result, tensor.device, finish=write_back(targets))


def all_gather_single(output: torch.Tensor, tensor: torch.Tensor, rank: int, world: int) -> Operation:
    return all_gather(blocks_of(output, tensor, world), tensor, [output], rank, world)


def gather(
    outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int, rank: int, world: int
) -> Operation:
    element = element_of(tensor)
    mine = DenseView.of(tensor).bytes
    targets: list[DenseView] = []
    if root == rank:
        check_blocks(outputs, element, world, equal=tensor.numel())
        targets = [DenseView.of(output) for output in outputs]
    flats = [target.bytes for target in targets]
    pieces = []
    for lo, hi in ranges(mine.numel(), element.size, world):
        size = hi - lo
        if root == rank:
            fill = _copy_at(mine[lo:hi], rank * size)
            piece = Chunk((size,) * world, size * world, fill, copy_out([(flat, lo, hi) for flat in flats]))
        else:
            piece = Chunk((size,) * world, size, copy_in([(mine, lo, hi)]), nothing)
        pieces.append(piece)
    finish = write_back(targets)
    return Operation("gather", element, pieces, list(outputs), tensor.device, root=root, finish=finish)


def scatter(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, rank: int, world: int
) -> Operation:
    element = element_of(output)
    target = DenseView.of(output)
    flats: list[torch.Tensor] = []
    if root == rank:
        check_blocks(inputs, element, world, equal=output.numel())
        flats = [DenseView.of(tensor).bytes for tensor in inputs]
    pieces = []
    for lo, hi in ranges(target.bytes.numel(), element.size, world):
        size = hi - lo
        drained = [(target.bytes, lo, hi)]
        if root == rank:
            fill, drain = copy_in([(flat, lo, hi) for flat in flats]), copy_out(drained, rank * size)
            piece = Chunk((size,) * world, size * world, fill, drain)
        else:
            piece = Chunk((size,) * world, size, nothing, copy_out(drained))
        pieces.append(piece)
    finish = write_back([target])
    return Operation("scatter", element, pieces, [output], output.device, root=root, finish=finish)


def all_to_all(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    result: list[torch.Tensor],
    rank: int,
    world: int,
) -> Operation:
    """What goes out lies first in shared memory, what comes in behind it."""
    element = element_of((*inputs, *outputs)[0])
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
        for other, place in enumerate(places):
            arrived = view[start : start + place.numel()]
            place.copy_(sources[rank] if other == rank else arrived)  # our own block stays with us
            start += place.numel()

    fill = copy_in([(source, 0, source.numel()) for source in sources])
    piece = Chunk((), sum(send) + sum(receive), fill, drain)
    return Operation(
        "all_to_all",
        element,
        [piece],
        result,
        inputs[0].device,
        splits=(send, receive),
        finish=write_back(targets),
    )


def _copy_at(values: torch.Tensor, start: int) -> Copy:
    return lambda view: view[start : start + values.numel()].copy_(values)
