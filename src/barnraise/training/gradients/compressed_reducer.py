"""Sums that travel encoded. What the codec lost is kept by this member, and sent with the next sum.

It is remembered when the step counts, not before: a sum that broke and is repeated sends the same bytes. What
a member kept dies with it: the error of one encoding, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from barnraise.compression import Codec, CodecRound, ErrorFeedback, FeedbackPart, PowerSGD
from barnraise.training.gradients.reducer import Pairs, ReduceGroup
from barnraise.training.sync import Sync


class Encoding(NamedTuple):
    """A member's numbers, and the form in which they travel."""

    tensor: torch.Tensor
    codec: Codec | PowerSGD
    turn: CodecRound
    parts: Sequence[FeedbackPart]
    feedback: ErrorFeedback


class CompressingGroup(Protocol):
    """What sums over the members in a codec's form."""

    world: int

    def sum_coded(self, mine: Encoding) -> tuple[torch.Tensor, Callable[[], None]]:
        """The sum, NaN if a number was not finite, and what to call when it counts."""


class CompressedReducer:
    """One residual for each parameter, whatever the codec."""

    def __init__(self) -> None:
        self._feedback = ErrorFeedback()
        self._codec: tuple[str, Codec | PowerSGD] | None = None
        self._keeps: list[Callable[[], None]] = []
        self._whole = self._kept_whole = 1.0

    def sum(
        self,
        circle: CompressingGroup,
        sync: Sync,
        step: int,
        pairs: Pairs,
        parts: Sequence[Sequence[FeedbackPart]],
        whole: float,
    ) -> None:
        """Of each pair (mine, total) the second becomes the sum of everybody's first.

        ``whole`` is what all members' sums are divided by later, or in proportion to it. What was lost of one
        is added in proportion: of a round of 32 batches as a thirty-second part to one of a single batch.
        """
        self._keeps, self._whole = [], whole
        if circle.world == 1:
            self._feedback.decay = whole / self._kept_whole
            for (mine, total), named in zip(pairs, parts, strict=True):
                total.copy_(self._feedback.compensated(mine, named))
            self._keeps.append(self._feedback.forget)
            return
        if self._codec is None or self._codec[0] != sync.codec:
            self._codec = (sync.codec, sync.made_codec())
        self._feedback.decay = sync.decay * whole / self._kept_whole
        for number, ((mine, total), named) in enumerate(zip(pairs, parts, strict=True)):
            turn = CodecRound(f"sum-{number}", step)
            found, keep = circle.sum_coded(Encoding(mine, self._codec[1], turn, named, self._feedback))
            total.copy_(found)
            self._keeps.append(keep)

    def begin_group(self) -> None:
        """A codec that learns from sums (PowerSGD) begins anew with all members; residuals stay."""
        self._codec = None

    def keep(self) -> None:
        """The step counts."""
        if not self._keeps:
            return
        for keep in self._keeps:
            keep()
        self._keeps, self._kept_whole = [], self._whole

    def pooled(self, circle: ReduceGroup, parts: Sequence[Sequence[FeedbackPart]]) -> dict[str, torch.Tensor]:
        """What all members keep, together: for a checkpoint, from which one of them goes on with it."""
        own: Mapping[str, torch.Tensor] = self._feedback.state_dict()["residuals"]
        named = [part for some in parts for part in some]
        flat = torch.cat([own.get(part.name, torch.zeros(part.numel)) for part in named])
        flat /= self._kept_whole
        circle.begin_sum(flat).wait()
        pieces = torch.split(flat, [part.numel for part in named])
        return {part.name: piece.clone() for part, piece in zip(named, pieces, strict=True)}

    def take(self, pooled: Mapping[str, torch.Tensor]) -> None:
        self._feedback.load_state_dict({"decay": 1.0, "residuals": dict(pooled)})
        self._kept_whole = 1.0
