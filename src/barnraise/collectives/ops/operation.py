"""One operation as torch requested it, cut into chunks of bytes for the submitter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from barnraise.collectives.ops.chunking import Chunk, DenseView, Finish, no_copy, write_back
from barnraise.collectives.ops.dtypes import ElementType, by_name
from barnraise.collectives.ops.tensors import element_type_of

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Operation:
    """A torch operation, ready to submit.

    Ranks compare ``kind`` to ``splits`` and the ``sizes`` of the chunks. The other fields are local.
    """

    kind: str
    element: ElementType
    chunks: Sequence[Chunk]
    result: list[torch.Tensor]
    device: torch.device
    reduction: str = ""
    root: int = -1
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    finish: Finish | None = None

    @property
    def agreed_bytes(self) -> int:
        """Return the size that is equal on every rank, and so may decide on the algorithm.

        It is 0 for all_to_all, whose splits differ between ranks.
        """
        return sum(sum(chunk.sizes) for chunk in self.chunks)

    @property
    def staged_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


def barrier() -> Operation:
    return Operation("barrier", by_name("uint8"), [Chunk((), 0, no_copy, no_copy)], [], _CPU)


def send(tensor: torch.Tensor) -> Operation:
    flat = DenseView.of(tensor).bytes
    chunk = Chunk((), flat.numel(), lambda view: view.copy_(flat), no_copy)
    return Operation("send", element_type_of(tensor), [chunk], [tensor], tensor.device)


def receive(tensor: torch.Tensor) -> Operation:
    target = DenseView.of(tensor)
    flat = target.bytes
    chunk = Chunk((), flat.numel(), no_copy, lambda view: flat.copy_(view))
    return Operation(
        "receive", element_type_of(tensor), [chunk], [tensor], tensor.device, finish=write_back([target])
    )
