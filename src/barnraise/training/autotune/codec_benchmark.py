"""How fast codecs are on this machine, so that its plans need not believe a table."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import torch

from barnraise.compression import Codec as Coder
from barnraise.compression import CodecRound, ErrorFeedback, codec_named
from barnraise.planning import PlanCodec

_NUMBERS = 1 << 20
_TIMES = 3


def measured(codecs: Sequence[PlanCodec]) -> tuple[PlanCodec, ...]:
    """The same with the speeds found now: of a member's part in a sum, error feedback and all."""
    numbers = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(0))
    found = []
    for codec in codecs:
        coder = codec_named(codec.name)
        if isinstance(coder, Coder):
            seconds = min(_work_s(coder, numbers) for _ in range(_TIMES))
            megabytes = numbers.numel() * numbers.element_size() / 1e6
            codec = msgspec.structs.replace(codec, mb_per_s=megabytes / seconds)
        found.append(codec)
    return tuple(found)


def _work_s(coder: Coder, numbers: torch.Tensor) -> float:
    """Its own gradient is encoded; of what comes, each number is decoded in a part and in the sum."""
    feedback, turn, total = ErrorFeedback(), CodecRound("speed"), torch.zeros_like(numbers)
    begin = time.perf_counter()
    payload = feedback.encode(coder, numbers, turn).payload
    for _ in range(2):
        coder.add(total, payload, turn)
    return time.perf_counter() - begin
