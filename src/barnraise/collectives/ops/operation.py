"""One operation as torch asked for it, brought to pieces of bytes: what the issuer needs to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from barnraise.collectives.ops.chunking import Dense, Finish, Piece, nothing, write_back
from barnraise.collectives.ops.dtypes import ElementType, by_name
from barnraise.collectives.ops.tensors import element_of

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Call:
    """``kind`` to ``splits`` are compared between ranks, ``sizes`` of the pieces too; the rest is our own."""

    kind: str
    element: ElementType
    pieces: Sequence[Piece]
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


def barrier() -> Call:
    return Call("barrier", by_name("uint8"), [Piece((), 0, nothing, nothing)], [], _CPU)


def send(tensor: torch.Tensor) -> Call:
    flat = Dense.of(tensor).bytes
    piece = Piece((), flat.numel(), lambda view: view.copy_(flat), nothing)
    return Call("send", element_of(tensor), [piece], [tensor], tensor.device)


def receive(tensor: torch.Tensor) -> Call:
    target = Dense.of(tensor)
    flat = target.bytes
    piece = Piece((), flat.numel(), nothing, lambda view: flat.copy_(view))
    return Call("receive", element_of(tensor), [piece], [tensor], tensor.device, finish=write_back([target]))
