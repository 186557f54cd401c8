"""Cuts a tensor operation into chunks that fit shared memory, and copies bytes in and out of them.

Chunks of a few MiB let copies overlap with the network and bound the memory of a large operation. The cut
depends only on sizes that are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

CHUNK_BYTES = 4 << 20

Cut = tuple[torch.Tensor, int, int]  # a flat tensor and a range of its elements
Copy = Callable[[torch.Tensor], object]
Finish = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One unit of work for the communication process: its sizes, and how its memory is filled and read."""

    sizes: tuple[int, ...]  # as the specification wants them: equal on all ranks
    nbytes: int  # of shared memory
    fill: Copy
    drain: Copy


def no_copy(_: torch.Tensor) -> None:
    """Copy nothing, for a rank that gives or takes no bytes."""


@dataclass(frozen=True, slots=True)
class DenseView:
    """A tensor's values in contiguous memory.

    ``copied``: the tensor was not contiguous, so a result must be written back.
    """

    tensor: torch.Tensor
    values: torch.Tensor
    copied: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> DenseView:
        """Return the dense view of a tensor, without autograd and version counter.

        Like every backend, we write to the memory that the caller names.
        """
        plain = tensor.data
        if plain.is_conj() or plain.is_neg():
            return cls(plain, plain.resolve_conj().resolve_neg().contiguous(), True)
        if plain.is_contiguous():
            return cls(plain, plain, False)
        return cls(plain, plain.contiguous(), True)

    @property
    def bytes(self) -> torch.Tensor:
        """Return a flat uint8 view of the values."""
        flat = self.values.view(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        return flat.view(torch.uint8)

    @property
    def flat(self) -> torch.Tensor:
        return self.values.view(-1)


def write_back(outputs: Sequence[DenseView]) -> Finish | None:
    """Return the copy that remains after all chunks were read, or None if there is none."""
    copies = [output for output in outputs if output.copied]
    if not copies:
        return None

    def finish() -> None:
        for output in copies:
            output.tensor.copy_(output.values)

    return finish


def chunk_ranges(total: int, item: int, parts: int = 1) -> list[tuple[int, int]]:
    """Cut ``total`` bytes into ranges that fit a chunk which ``parts`` ranges share.

    Return one empty range for no bytes.
    """
    limit = max(item, CHUNK_BYTES // parts // item * item)
    if total <= limit + limit // 2:
        return [(0, total)]
    count = -(-total // limit)
    step = -(-total // (count * item)) * item
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def cut_blocks(flats: Sequence[torch.Tensor], item: int) -> list[list[Cut]]:
    """Cut blocks so that a chunk takes the same range of every block.

    A short block is empty in later chunks. ``item``: size in bytes of an element that must not be cut, even
    if ``flats`` hold single bytes.
    """
    unit = item // flats[0].element_size()
    longest = max(flat.numel() * flat.element_size() for flat in flats)
    cuts = []
    for lo, hi in chunk_ranges(longest, item, len(flats)):
        low, high = lo // item * unit, hi // item * unit
        cuts.append([(flat, min(low, flat.numel()), min(high, flat.numel())) for flat in flats])
    return cuts


def copy_in(cuts: Sequence[Cut]) -> Copy:
    """Return a copy that writes the cuts one after another into shared memory."""

    def fill(view: torch.Tensor) -> None:
        start = 0
        for flat, lo, hi in cuts:
            view[start : start + hi - lo].copy_(flat[lo:hi])
            start += hi - lo

    return fill


def copy_out(cuts: Sequence[Cut], start: int = 0) -> Copy:
    """Return a copy that reads the cuts one after another from ``start`` on."""

    def drain(view: torch.Tensor) -> None:
        offset = start
        for flat, lo, hi in cuts:
            flat[lo:hi].copy_(view[offset : offset + hi - lo])
            offset += hi - lo

    return drain
