"""randomk: one number of each few, drawn anew at each step. Only the numbers travel, not where they were.

Which ones follows from (seed, tensor, step) on every member alike, so payloads of one turn can be summed and
the sum encoded again without any loss. Without error feedback the result is too small: what was not drawn is
zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from blake3 import blake3

from barnraise.compression.codecs.codec import Codec, CodecRound, read, refuse_unless_finite, require_finite
from barnraise.core.errors import ConfigError, ProtocolError

MOST_EVERY = 1 << 16
_TAG_BYTES = 8


@dataclass(frozen=True)
class RandomK(Codec):
    """Payload: a tag of what was drawn for (so that numbers never end up at other places), then float32."""

    every: int = 64
    seed: int = 0
    item = 4

    def __post_init__(self) -> None:
        if not 1 <= self.every <= MOST_EVERY:
            raise ConfigError(
                f"randomk cannot send one number of each {self.every}",
                hint=f"Give a number from 1 to {MOST_EVERY}, such as randomk:every=64.",
            )

    @property
    def name(self) -> str:
        return f"randomk:every={self.every},seed={self.seed}"

    @property
    def grain(self) -> int:
        return self.every

    def payload_bytes(self, numel: int) -> int:
        return _TAG_BYTES + 4 * -(-numel // self.every)

    def _encode(self, flat: torch.Tensor, turn: CodecRound) -> torch.Tensor:
        refuse_unless_finite(flat, turn.name)
        tag, positions = self._drawn(flat.numel(), turn)
        values = flat[positions.to(flat.device)].view(torch.uint8)
        return torch.cat([torch.tensor(list(tag), dtype=torch.uint8, device=flat.device), values])

    def _add(self, total: torch.Tensor, payload: torch.Tensor, turn: CodecRound, sign: float) -> None:
        tag, positions = self._drawn(total.numel(), turn)
        if bytes(payload[:_TAG_BYTES].tolist()) != tag:
            raise ProtocolError(
                f"numbers of {turn.name!r} were drawn for another tensor, step or seed",
                hint="Give all members the same codec, and count their steps alike.",
            )
        values = read(payload, _TAG_BYTES, positions.numel(), torch.float32)
        require_finite(values)
        total.index_add_(0, positions.to(total.device), values, alpha=sign)

    def _drawn(self, numel: int, turn: CodecRound) -> tuple[bytes, torch.Tensor]:
        key = blake3(f"{self.seed}/{turn.step}/{numel}/{self.every}/{turn.name}".encode()).digest(length=24)
        groups = -(-numel // self.every)
        # The raw output of Philox is specified bit by bit, and so is what is made of it here.
        stream = numpy.random.Philox(key=int.from_bytes(key[:16], "little"))
        raw = stream.random_raw(groups) >> numpy.uint64(32)
        firsts = numpy.arange(groups, dtype=numpy.int64) * self.every
        widths = numpy.minimum(numel - firsts, self.every).astype(numpy.uint64)
        positions = firsts + (raw * widths >> numpy.uint64(32)).astype(numpy.int64)
        return key[16:], torch.from_numpy(positions)
