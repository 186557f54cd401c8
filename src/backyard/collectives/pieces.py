"""Cutting a tensor operation into pieces that fit shared memory, and moving bytes in and out of them.

Pieces of a few MiB let copies overlap with the network and bound the memory of a large operation. The cut
depends only on sizes that all ranks agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of the mover: what it is told, and how its memory is filled and read."""

    sizes: tuple[int, ...]  # as the specification wants them
    nbytes: int  # of shared memory
    fill: Callable[[torch.Tensor], None]
    drain: Callable[[torch.Tensor], None]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a contiguous tensor."""
    flat = tensor.view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8)


def dense(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A contiguous tensor with these values; True if it is a copy that must be written back."""
    if tensor.is_contiguous():
        return tensor, False
    return tensor.contiguous(), True


def ranges(total: int, item: int, parts: int = 1) -> list[tuple[int, int]]:
    """Byte ranges of at most a piece when ``parts`` of them share its memory; one empty range for nothing."""
    limit = max(item, PIECE_BYTES // parts // item * item)
    if total <= limit + limit // 2:
        return [(0, total)]
    count = -(-total // limit)
    step = -(-total // (count * item)) * item
    return [(start, min(start + step, total)) for start in range(0, total, step)]
