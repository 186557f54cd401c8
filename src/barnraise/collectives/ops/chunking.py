"""Cutting a tensor operation into pieces that fit shared memory, and moving bytes in and out of them.

Pieces of a few MiB let copies overlap with the network and bound the memory of a large operation. The cut
depends only on sizes that all ranks agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

PIECE_BYTES = 4 << 20

Cut = tuple[torch.Tensor, int, int]  # a flat tensor and a range of its elements
Copy = Callable[[torch.Tensor], object]
Finish = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One run of the mover: what it is told, and how its memory is filled and read."""

    sizes: tuple[int, ...]  # as the specification wants them: equal on all ranks
    nbytes: int  # of shared memory
    fill: Copy
    drain: Copy


def nothing(_: torch.Tensor) -> None:
    """The copy of a rank that gives or takes no bytes."""


@dataclass(frozen=True, slots=True)
class DenseView:
    """A tensor's values in a row. ``copied``: they lay otherwise, and a result must be written back."""

    tensor: torch.Tensor
    values: torch.Tensor
    copied: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> DenseView:
        """Without autograd and version counter: like every backend, we write where the caller says."""
        plain = tensor.data
        if plain.is_conj() or plain.is_neg():
            return cls(plain, plain.resolve_conj().resolve_neg().contiguous(), True)
        if plain.is_contiguous():
            return cls(plain, plain, False)
        return cls(plain, plain.contiguous(), True)

    @property
    def bytes(self) -> torch.Tensor:
        """A flat uint8 view."""
        flat = self.values.view(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        return flat.view(torch.uint8)

    @property
    def flat(self) -> torch.Tensor:
        return self.values.view(-1)


def write_back(outputs: Sequence[DenseView]) -> Finish | None:
    """What is left to do when all pieces have been read; None if nothing is."""
    copies = [output for output in outputs if output.copied]
    if not copies:
        return None

    def finish() -> None:
        for output in copies:
            output.tensor.copy_(output.values)

    return finish


def ranges(total: int, item: int, parts: int = 1) -> list[tuple[int, int]]:
    """Byte ranges of at most a piece when ``parts`` of them share its memory; one empty range for nothing."""
    limit = max(item, PIECE_BYTES // parts // item * item)
    if total <= limit + limit // 2:
        return [(0, total)]
    count = -(-total // limit)
    step = -(-total // (count * item)) * item
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def cut_blocks(flats: Sequence[torch.Tensor], item: int) -> list[list[Cut]]:
    """Pieces that take the same part of every block; a short block is empty in later pieces.

    ``item`` is the size of an element that may not be cut, also where ``flats`` are its single bytes.
    """
    unit = item // flats[0].element_size()
    longest = max(flat.numel() * flat.element_size() for flat in flats)
    cuts = []
    for lo, hi in ranges(longest, item, len(flats)):
        low, high = lo // item * unit, hi // item * unit
        cuts.append([(flat, min(low, flat.numel()), min(high, flat.numel())) for flat in flats])
    return cuts


def copy_in(cuts: Sequence[Cut]) -> Copy:
    """Lay the cuts one behind the other."""

    def fill(view: torch.Tensor) -> None:
        start = 0
        for flat, lo, hi in cuts:
            view[start : start + hi - lo].copy_(flat[lo:hi])
            start += hi - lo

    return fill


def copy_out(cuts: Sequence[Cut], start: int = 0) -> Copy:
    """Read the cuts, which lie one behind the other from ``start`` on."""

    def drain(view: torch.Tensor) -> None:
        offset = start
        for flat, lo, hi in cuts:
            flat[lo:hi].copy_(view[offset : offset + hi - lo])
            offset += hi - lo

    return drain
