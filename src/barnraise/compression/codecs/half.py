"""fp16 and bf16 codecs: half the bytes. Values beyond the type's range are clamped to its maximum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from barnraise.compression.codecs.codec import (
    Codec,
    CodecRound,
    check_input_finite,
    check_payload_finite,
    chunks,
    read,
)


@dataclass(frozen=True)
class Half(Codec):
    dtype: torch.dtype = torch.float16
    item = 2

    @property
    def name(self) -> str:
        return "fp16" if self.dtype == torch.float16 else "bf16"

    def payload_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, flat: torch.Tensor, codec_round: CodecRound) -> torch.Tensor:
        if not flat.numel():
            return flat.to(self.dtype).view(torch.uint8)
        extremes = torch.stack(torch.aminmax(flat))
        check_input_finite(extremes, codec_round.name)
        max_value = torch.finfo(self.dtype).max
        if float(extremes.abs().max()) > max_value:
            flat = flat.clamp(-max_value, max_value)
        return flat.to(self.dtype).view(torch.uint8)

    def _add(self, total: torch.Tensor, payload: torch.Tensor, codec_round: CodecRound, sign: float) -> None:
        values = read(payload, 0, total.numel(), self.dtype)
        for rows_slice in chunks(total.numel(), 1, total.device):
            wide = values[rows_slice].to(torch.float32)
            check_payload_finite(wide)
            total[rows_slice].add_(wide, alpha=sign)
