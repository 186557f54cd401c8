"""int4: 7 steps each way, two numbers in a byte.

No number is off by more than 1 / 14 of the largest magnitude of its block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from barnraise.compression.codecs.block_scaling import (
    ScaledBlocks,
    blocks_of,
    check_block,
    count,
    read_scales,
    scales_of,
)
from barnraise.compression.codecs.codec import Codec, CodecRound, chunks

_LEVELS = 7
_ZERO = 8  # the code of zero: the codes in use are 1 to 15


@dataclass(frozen=True)
class Int4(Codec):
    """Payload: all scales (float32), then the codes.

    A byte holds a number of the first half of a block and, times 16, its counterpart in the second half, so
    that halves are worked on in one go.
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_block("int4", self.block)

    @property
    def name(self) -> str:
        return f"int4:block={self.block}"

    @property
    def grain(self) -> int:
        return self.block

    def payload_bytes(self, numel: int) -> int:
        return 4 * count(numel, self.block) + -(-numel // 2)

    def _encode(self, flat: torch.Tensor, turn: CodecRound) -> torch.Tensor:
        scales, inverses = scales_of(flat, self.block, _LEVELS, turn.name)
        payload = torch.empty(self.payload_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
        start = 4 * scales.numel()
        payload[:start].copy_(scales.view(torch.uint8))
        for part in blocks_of(flat.numel(), self.block):
            values = flat[part.first : part.last].view(part.rows, part.width)
            target = _bytes_of(payload, start, part)
            half, own = target.shape[1], inverses[part.scales].unsqueeze(1)
            for some in chunks(part.rows, part.width, flat.device):
                codes = (values[some] * own[some]).round_().add_(_ZERO)
                low, high = codes[:, :half], codes[:, half:]
                low[:, : high.shape[1]].add_(high, alpha=16)
                target[some].copy_(low)
        return payload

    def _add(self, total: torch.Tensor, payload: torch.Tensor, turn: CodecRound, sign: float) -> None:
        scales = read_scales(payload, total.numel(), self.block, _LEVELS)
        for part in blocks_of(total.numel(), self.block):
            source = _bytes_of(payload, 4 * scales.numel(), part)
            target = total[part.first : part.last].view(part.rows, part.width)
            half, own = source.shape[1], scales[part.scales].unsqueeze(1)
            for some in chunks(part.rows, part.width, total.device):
                packed = source[some]
                for codes, into in (
                    (packed & 15, target[some, :half]),
                    (packed[:, : part.width - half] >> 4, target[some, half:]),
                ):
                    into.add_(codes.to(torch.float32).sub_(_ZERO).mul_(own[some]), alpha=sign)


def _bytes_of(payload: torch.Tensor, start: int, part: ScaledBlocks) -> torch.Tensor:
    """The codes of some blocks as rows; all blocks before them are of even width."""
    half = (part.width + 1) // 2
    first = start + part.first // 2
    return payload[first : first + part.rows * half].view(part.rows, half)
