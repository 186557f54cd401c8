"""fp32: the numbers as they are. With it, sums have an order of their own but lose nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from barnraise.compression.codecs.codec import Codec, CodecRound, read, refuse_unless_finite, require_finite


@dataclass(frozen=True)
class Fp32(Codec):
    item = 4

    @property
    def name(self) -> str:
        return "fp32"

    def payload_bytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, flat: torch.Tensor, turn: CodecRound) -> torch.Tensor:
        refuse_unless_finite(flat, turn.name)
        return flat.clone().view(torch.uint8)  # what is left of the input may be taken away from it

    def _add(self, total: torch.Tensor, payload: torch.Tensor, turn: CodecRound, sign: float) -> None:
        values = read(payload, 0, total.numel(), torch.float32)
        require_finite(values)
        total.add_(values, alpha=sign)
