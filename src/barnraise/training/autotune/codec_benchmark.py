"""Benchmark of codecs on this machine, so that plans need not rely on a table."""

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


def measure_codecs(codecs: Sequence[PlanCodec]) -> tuple[PlanCodec, ...]:
    """Return the codecs with the speeds measured now, including error feedback."""
    numbers = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(0))
    measured = []
    for codec in codecs:
        coder = codec_named(codec.name)
        if isinstance(coder, Coder):
            seconds = min(_work_s(coder, numbers) for _ in range(_TIMES))
            megabytes = numbers.numel() * numbers.element_size() / 1e6
            codec = msgspec.structs.replace(codec, mb_per_s=megabytes / seconds)
        measured.append(codec)
    return tuple(measured)


def _work_s(coder: Coder, numbers: torch.Tensor) -> float:
    """Measure a worker's part in one compressed all-reduce: one encoding and two decodings."""
    feedback, turn, total = ErrorFeedback(), CodecRound("speed"), torch.zeros_like(numbers)
    start = time.perf_counter()
    payload = feedback.encode(coder, numbers, turn).payload
    for _ in range(2):
        coder.add(total, payload, turn)
    return time.perf_counter() - start
