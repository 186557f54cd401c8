"""fp32 codec: the numbers unchanged. It fixes the order of sums and loses nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from barnraise.compression.codecs.codec import (
    Codec,
    CodecRound,
    check_input_finite,
    check_payload_finite,
    read,
)


@dataclass(frozen=True)
class Fp32(Codec):
    item = 4

    @property
    def name(self) -> str:
        return "fp32"

    def payload_bytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, flat: torch.Tensor, codec_round: CodecRound) -> torch.Tensor:
        check_input_finite(flat, codec_round.name)
        return flat.clone().view(torch.uint8)  # a copy, because the input becomes the residual

    def _add(self, total: torch.Tensor, payload: torch.Tensor, codec_round: CodecRound, sign: float) -> None:
        values = read(payload, 0, total.numel(), torch.float32)
        check_payload_finite(values)
        total.add_(values, alpha=sign)
