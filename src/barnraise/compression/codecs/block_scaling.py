"""Block scaling: blocks of a flat tensor with one scale each, shared by int8 and int4."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from barnraise.compression.codecs.codec import check_input_finite, read
from barnraise.core.errors import ConfigError, ProtocolError

MAX_BLOCK = 1 << 16
# A block whose magnitudes are all below this is sent as zeros: scales and inverses would lose precision.
_SMALLEST = 2.0**-100
_LARGEST = float(torch.finfo(torch.float32).max)


class ScaledBlocks(NamedTuple):
    """Equal blocks as rows, with their first position in the tensor and in its list of scales."""

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


def iterate_blocks(numel: int, block: int) -> Iterator[ScaledBlocks]:
    """Yield the full blocks, then the shorter block at the end if there is one."""
    whole, rest = divmod(numel, block)
    if whole:
        yield ScaledBlocks(0, 0, whole, block)
    if rest:
        yield ScaledBlocks(whole * block, whole, 1, rest)


def block_count(numel: int, block: int) -> int:
    return -(-numel // block)


def check_block_size(name: str, block: int) -> None:
    if not 2 <= block <= MAX_BLOCK or block % 2:
        raise ConfigError(
            f"{name} cannot work in blocks of {block} numbers",
            hint=f"Give an even block from 2 to {MAX_BLOCK}, such as {name}:block=256.",
        )


def compute_scales(
    flat: torch.Tensor, block: int, levels: int, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step size of each block and its inverse.

    The largest magnitude of a block is ``levels`` steps.
    """
    scales = torch.empty(block_count(flat.numel(), block), dtype=torch.float32, device=flat.device)
    for part in iterate_blocks(flat.numel(), block):
        rows = flat[part.first : part.last].view(part.rows, part.width)
        scales[part.scales] = torch.maximum(rows.amax(1), rows.amin(1).neg_())
    check_input_finite(scales, name)
    is_zero = scales < _SMALLEST
    inverses = (levels / scales).masked_fill_(is_zero, 0.0)
    scales.div_(levels).clamp_(max=_largest_step(levels)).masked_fill_(is_zero, 0.0)
    return scales, inverses


def read_scales(payload: torch.Tensor, numel: int, block: int, levels: int) -> torch.Tensor:
    """Read the scales at the start of a payload. Raise ProtocolError if one would give infinite numbers."""
    scales = read(payload, 0, block_count(numel, block), torch.float32)
    smallest, largest = torch.aminmax(scales)
    if not (float(smallest) >= 0 and float(largest) <= _largest_step(levels)):  # this form rejects NaN
        raise ProtocolError("a payload holds a scale that is negative or too large", not_finite=True)
    return scales


def _largest_step(levels: int) -> float:
    """Return the largest step whose product with the largest code (128 for 127 levels) is a float32."""
    return _LARGEST / 2.0 ** math.ceil(math.log2(levels + 1))
