"""int8 codec: 127 steps each way. The error is at most 1 / 254 of the largest magnitude in a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from barnraise.compression.codecs.block_scaling import (
    block_count,
    check_block_size,
    compute_scales,
    iterate_blocks,
    read_scales,
)
from barnraise.compression.codecs.codec import Codec, CodecRound, chunks

_LEVELS = 127


@dataclass(frozen=True)
class Int8(Codec):
    """int8 payload: all scales (float32), then one byte for each number."""

    block: int = 256

    def __post_init__(self) -> None:
        check_block_size("int8", self.block)

    @property
    def name(self) -> str:
        return f"int8:block={self.block}"

    @property
    def grain(self) -> int:
        return self.block

    def payload_bytes(self, numel: int) -> int:
        return 4 * block_count(numel, self.block) + numel

    def _encode(self, flat: torch.Tensor, codec_round: CodecRound) -> torch.Tensor:
        scales, inverses = compute_scales(flat, self.block, _LEVELS, codec_round.name)
        payload = torch.empty(self.payload_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
        start = 4 * scales.numel()
        payload[:start].copy_(scales.view(torch.uint8))
        codes = payload[start:].view(torch.int8)
        for part in iterate_blocks(flat.numel(), self.block):
            values = flat[part.first : part.last].view(part.rows, part.width)
            target = codes[part.first : part.last].view(part.rows, part.width)
            own = inverses[part.scales].unsqueeze(1)
            for rows_slice in chunks(part.rows, part.width, flat.device):
                target[rows_slice].copy_((values[rows_slice] * own[rows_slice]).round_())
        return payload

    def _add(self, total: torch.Tensor, payload: torch.Tensor, codec_round: CodecRound, sign: float) -> None:
        scales = read_scales(payload, total.numel(), self.block, _LEVELS)
        codes = payload[4 * scales.numel() :].view(torch.int8)
        for part in iterate_blocks(total.numel(), self.block):
            source = codes[part.first : part.last].view(part.rows, part.width)
            target = total[part.first : part.last].view(part.rows, part.width)
            own = scales[part.scales].unsqueeze(1)
            for rows_slice in chunks(part.rows, part.width, total.device):
                target[rows_slice].add_(
                    source[rows_slice].to(torch.float32).mul_(own[rows_slice]), alpha=sign
                )
