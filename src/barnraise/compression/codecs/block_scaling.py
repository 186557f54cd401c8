"""Blocks of a flat tensor, each with one scale: what int8 and int4 have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from barnraise.compression.codecs.codec import read, refuse_unless_finite
from barnraise.core.errors import ConfigError, ProtocolError

MOST_BLOCK = 1 << 16
# A block without any number above this is sent as zeros: below, scales and their inverses lose their digits.
_SMALLEST = 2.0**-100
_LARGEST = float(torch.finfo(torch.float32).max)


class ScaledBlocks(NamedTuple):
    """Equal blocks as rows, and where they begin in the tensor and in its list of scales."""

    first: int
    first_scale: int
    rows: int
    width: int

    @property
    def last(self) -> int:
        return self.first + self.rows * self.width

    @property
    def scales(self) -> slice:
        return slice(self.first_scale, self.first_scale + self.rows)


def blocks_of(numel: int, block: int) -> Iterator[ScaledBlocks]:
    """The whole blocks, then the shorter one at the end, if there is one."""
    whole, rest = divmod(numel, block)
    if whole:
        yield ScaledBlocks(0, 0, whole, block)
    if rest:
        yield ScaledBlocks(whole * block, whole, 1, rest)


def count(numel: int, block: int) -> int:
    return -(-numel // block)


def check_block(name: str, block: int) -> None:
    if not 2 <= block <= MOST_BLOCK or block % 2:
        raise ConfigError(
            f"{name} cannot work in blocks of {block} numbers",
            hint=f"Give an even block from 2 to {MOST_BLOCK}, such as {name}:block=256.",
        )


def scales_of(flat: torch.Tensor, block: int, levels: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One step's size for each block, so that its largest magnitude is ``levels`` steps; and the inverses."""
    scales = torch.empty(count(flat.numel(), block), dtype=torch.float32, device=flat.device)
    for part in blocks_of(flat.numel(), block):
        rows = flat[part.first : part.last].view(part.rows, part.width)
        scales[part.scales] = torch.maximum(rows.amax(1), rows.amin(1).neg_())
    refuse_unless_finite(scales, name)
    is_zero = scales < _SMALLEST
    inverses = (levels / scales).masked_fill_(is_zero, 0.0)
    scales.div_(levels).clamp_(max=_largest_step(levels)).masked_fill_(is_zero, 0.0)
    return scales, inverses


def read_scales(payload: torch.Tensor, numel: int, block: int, levels: int) -> torch.Tensor:
    """From the beginning of a payload; ProtocolError if one would make numbers that are not finite."""
    scales = read(payload, 0, count(numel, block), torch.float32)
    least, most = torch.aminmax(scales)
    if not (float(least) >= 0 and float(most) <= _largest_step(levels)):  # so written, NaN fails too
        raise ProtocolError("a payload holds a scale that is negative or too large", not_finite=True)
    return scales


def _largest_step(levels: int) -> float:
    """So that the largest code, 128 of 127 levels included, times it is still a float32."""
    return _LARGEST / 2.0 ** math.ceil(math.log2(levels + 1))
