"""One operation as torch asked for it, brought to pieces of bytes: what the issuer needs to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from barnraise.collectives.ops.chunking import Chunk, DenseView, Finish, nothing, write_back
from barnraise.collectives.ops.dtypes import ElementType, by_name
from barnraise.collectives.ops.tensors import element_of

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Operation:
    """``kind`` to ``splits`` are compared between ranks, ``sizes`` of the pieces too; the rest is our own."""

    kind: str
    element: ElementType
    pieces: Sequence[Chunk]
    result: list[torch.Tensor]
    device: torch.device
    reduction: str = ""
    root: int = -1
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    finish: Finish | None = None

    @property
    def agreed_bytes(self) -> int:
        """The size that may decide something: the same on every rank, so nothing where splits differ."""
        return sum(sum(piece.sizes) for piece in self.pieces)

    @property
    def staged_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def barrier() -> Operation:
    return Operation("barrier", by_name("uint8"), [Chunk((), 0, nothing, nothing)], [], _CPU)


def send(tensor: torch.Tensor) -> Operation:
    flat = DenseView.of(tensor).bytes
    piece = Chunk((), flat.numel(), lambda view: view.copy_(flat), nothing)
    return Operation("send", element_of(tensor), [piece], [tensor], tensor.device)


def receive(tensor: torch.Tensor) -> Operation:
    target = DenseView.of(tensor)
    flat = target.bytes
    piece = Chunk((), flat.numel(), nothing, lambda view: flat.copy_(view))
    return Operation(
        "receive", element_of(tensor), [piece], [tensor], tensor.device, finish=write_back([target])
    )
