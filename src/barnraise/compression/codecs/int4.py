"""int4 codec: 7 steps each way, two numbers in a byte.

The error of a number is at most 1 / 14 of the largest magnitude in its block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from barnraise.compression.codecs.block_scaling import (
    ScaledBlocks,
    block_count,
    check_block_size,
    compute_scales,
    iterate_blocks,
    read_scales,
)
from barnraise.compression.codecs.codec import Codec, CodecRound, chunks

_LEVELS = 7
_ZERO = 8  # the code of zero: the codes in use are 1 to 15


@dataclass(frozen=True)
class Int4(Codec):
    """int4 payload: all scales (float32), then the codes.

    A byte holds a number of the first half of a block and, times 16, its counterpart in the second half.
    Whole halves are then computed at once.
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_block_size("int4", self.block)

    @property
    def name(self) -> str:
        return f"int4:block={self.block}"

    @property
    def grain(self) -> int:
        return self.block

    def payload_bytes(self, numel: int) -> int:
        return 4 * block_count(numel, self.block) + -(-numel // 2)

    def _encode(self, flat: torch.Tensor, codec_round: CodecRound) -> torch.Tensor:
        scales, inverses = compute_scales(flat, self.block, _LEVELS, codec_round.name)
        payload = torch.empty(self.payload_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
        start = 4 * scales.numel()
        payload[:start].copy_(scales.view(torch.uint8))
        for part in iterate_blocks(flat.numel(), self.block):
            values = flat[part.first : part.last].view(part.rows, part.width)
            target = _bytes_of(payload, start, part)
            half, own = target.shape[1], inverses[part.scales].unsqueeze(1)
            for rows_slice in chunks(part.rows, part.width, flat.device):
                codes = (values[rows_slice] * own[rows_slice]).round_().add_(_ZERO)
                low, high = codes[:, :half], codes[:, half:]
                low[:, : high.shape[1]].add_(high, alpha=16)
                target[rows_slice].copy_(low)
        return payload

    def _add(self, total: torch.Tensor, payload: torch.Tensor, codec_round: CodecRound, sign: float) -> None:
        scales = read_scales(payload, total.numel(), self.block, _LEVELS)
        for part in iterate_blocks(total.numel(), self.block):
            source = _bytes_of(payload, 4 * scales.numel(), part)
            target = total[part.first : part.last].view(part.rows, part.width)
            half, own = source.shape[1], scales[part.scales].unsqueeze(1)
            for rows_slice in chunks(part.rows, part.width, total.device):
                packed = source[rows_slice]
                for codes, into in (
                    (packed & 15, target[rows_slice, :half]),
                    (packed[:, : part.width - half] >> 4, target[rows_slice, half:]),
                ):
                    into.add_(codes.to(torch.float32).sub_(_ZERO).mul_(own[rows_slice]), alpha=sign)


def _bytes_of(payload: torch.Tensor, start: int, part: ScaledBlocks) -> torch.Tensor:
    """Return the codes of some blocks as rows. All blocks before them have an even width."""
    half = (part.width + 1) // 2
    first = start + part.first // 2
    return payload[first : first + part.rows * half].view(part.rows, half)
