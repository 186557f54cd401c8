"""randomk codec: one random number of every few, drawn again at each step. Positions are not sent.

The positions follow from (seed, tensor, step) on every member. So payloads of one round can be summed, and
the sum encoded again without loss. Without error feedback the result is too small, because numbers that
were not drawn count as zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from blake3 import blake3

from barnraise.compression.codecs.codec import (
    Codec,
    CodecRound,
    check_input_finite,
    check_payload_finite,
    read,
)
from barnraise.core.errors import ConfigError, ProtocolError

MAX_EVERY = 1 << 16
_TAG_BYTES = 8


@dataclass(frozen=True)
class RandomK(Codec):
    """randomk payload: a tag of the draw, then float32 numbers.

    The tag prevents that numbers are added at wrong positions.
    """

    every: int = 64
    seed: int = 0
    item = 4

    def __post_init__(self) -> None:
        if not 1 <= self.every <= MAX_EVERY:
            raise ConfigError(
                f"randomk cannot send one number of each {self.every}",
                hint=f"Give a number from 1 to {MAX_EVERY}, such as randomk:every=64.",
            )

    @property
    def name(self) -> str:
        return f"randomk:every={self.every},seed={self.seed}"

    @property
    def grain(self) -> int:
        return self.every

    def payload_bytes(self, numel: int) -> int:
        return _TAG_BYTES + 4 * -(-numel // self.every)

    def _encode(self, flat: torch.Tensor, codec_round: CodecRound) -> torch.Tensor:
        check_input_finite(flat, codec_round.name)
        tag, positions = self._draw(flat.numel(), codec_round)
        values = flat[positions.to(flat.device)].view(torch.uint8)
        return torch.cat([torch.tensor(list(tag), dtype=torch.uint8, device=flat.device), values])

    def _add(self, total: torch.Tensor, payload: torch.Tensor, codec_round: CodecRound, sign: float) -> None:
        tag, positions = self._draw(total.numel(), codec_round)
        if bytes(payload[:_TAG_BYTES].tolist()) != tag:
            raise ProtocolError(
                f"numbers of {codec_round.name!r} were drawn for another tensor, step or seed",
                hint="Give all workers the same codec, and count their steps alike.",
            )
        values = read(payload, _TAG_BYTES, positions.numel(), torch.float32)
        check_payload_finite(values)
        total.index_add_(0, positions.to(total.device), values, alpha=sign)

    def _draw(self, numel: int, codec_round: CodecRound) -> tuple[bytes, torch.Tensor]:
        key = blake3(
            f"{self.seed}/{codec_round.step}/{numel}/{self.every}/{codec_round.name}".encode()
        ).digest(length=24)
        groups = -(-numel // self.every)
        # Philox's raw output is specified bit by bit, and so is the following arithmetic.
        stream = numpy.random.Philox(key=int.from_bytes(key[:16], "little"))
        raw = stream.random_raw(groups) >> numpy.uint64(32)
        firsts = numpy.arange(groups, dtype=numpy.int64) * self.every
        widths = numpy.minimum(numel - firsts, self.every).astype(numpy.uint64)
        positions = firsts + (raw * widths >> numpy.uint64(32)).astype(numpy.int64)
        return key[16:], torch.from_numpy(positions)
