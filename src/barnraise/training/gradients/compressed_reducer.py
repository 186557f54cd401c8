"""Compressed all-reduce with error feedback: what a codec loses is added to the worker's next gradient.

The error is stored when the step is committed, not before: an all-reduce that failed and is repeated sends
the same bytes. A worker that dies loses its stored error, which is the error of one encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from barnraise.compression import Codec, CodecRound, ErrorFeedback, FeedbackPart, PowerSGD
from barnraise.training.gradients.reducer import Pairs
from barnraise.training.group.interface import CompressingGroup, Encoding, ReduceGroup
from barnraise.training.sync import Sync


class CompressedReducer:
    """Error feedback with one residual for each parameter, independent of the codec."""

    def __init__(self) -> None:
        self._feedback = ErrorFeedback()
        self._codec: tuple[str, Codec | PowerSGD] | None = None
        self._on_commit: list[Callable[[], None]] = []
        self._divisor = self._residual_divisor = 1.0

    def all_reduce(
        self,
        group: CompressingGroup,
        sync: Sync,
        step: int,
        pairs: Pairs,
        parts: Sequence[Sequence[FeedbackPart]],
        divisor: float,
    ) -> None:
        """Sum ``own`` of each (own, total) pair over all workers into ``total``.

        ``divisor``: the total is divided by it later, or in proportion to it. Residuals are scaled
        accordingly: the error of a round of 32 batches counts a thirty-second in a step of one batch.
        """
        self._on_commit, self._divisor = [], divisor
        if group.world == 1:
            self._feedback.decay = divisor / self._residual_divisor
            for (own, total), named in zip(pairs, parts, strict=True):
                total.copy_(self._feedback.compensated(own, named))
            self._on_commit.append(self._feedback.forget)
            return
        if self._codec is None or self._codec[0] != sync.codec:
            self._codec = (sync.codec, sync.make_codec())
        self._feedback.decay = sync.decay * divisor / self._residual_divisor
        for number, ((own, total), named) in enumerate(zip(pairs, parts, strict=True)):
            turn = CodecRound(f"sum-{number}", step)
            result, keep = group.all_reduce_compressed(
                Encoding(own, self._codec[1], turn, named, self._feedback)
            )
            total.copy_(result)
            self._on_commit.append(keep)

    def reset_codec(self) -> None:
        """Restart a codec that learns from sums (PowerSGD) for a new group. Residuals stay."""
        self._codec = None

    def commit(self) -> None:
        """Store the residuals of the last all-reduce, because its step is committed."""
        if not self._on_commit:
            return
        for keep in self._on_commit:
            keep()
        self._on_commit, self._residual_divisor = [], self._divisor

    def sum_residuals(
        self, group: ReduceGroup, parts: Sequence[Sequence[FeedbackPart]]
    ) -> dict[str, torch.Tensor]:
        """Return the residuals of all workers, summed, for a checkpoint."""
        own: Mapping[str, torch.Tensor] = self._feedback.state_dict()["residuals"]
        named = [part for some in parts for part in some]
        flat = torch.cat([own.get(part.name, torch.zeros(part.numel)) for part in named])
        flat /= self._residual_divisor
        group.all_reduce_async(flat).wait()
        pieces = torch.split(flat, [part.numel for part in named])
        return {part.name: piece.clone() for part, piece in zip(named, pieces, strict=True)}

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Replace this worker's residuals by those of a checkpoint."""
        self._feedback.load_state_dict({"decay": 1.0, "residuals": dict(residuals)})
        self._residual_divisor = 1.0
