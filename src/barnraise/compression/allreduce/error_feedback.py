"""Error feedback: what a codec lost of a tensor is added to it the next time.

One residual for each named tensor and member. It is the member's own: it is saved and loaded with that
member, and a newcomer begins without any; a copy of another member's would count that one's losses twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from barnraise.compression.codecs.codec import Codec, CodecRound, as_flat
from barnraise.core.errors import ConfigError, RunError

_FORGET = "Forget the residuals with forget(), or load those that were saved with this model."


class FeedbackPart(NamedTuple):
    """A named tensor within a flat one; they lie there one after the other."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Encoded(NamedTuple):
    """A payload, and what it lacks."""

    payload: torch.Tensor
    residual: torch.Tensor


class ErrorFeedback:
    """Residuals by name. ``decay`` below 1 lets old losses fade: 0.95 suits sparse codecs of local steps.

    Nothing changes until `keep`: a step that broke and is repeated starts from the same residuals.
    """

    def __init__(self, decay: float = 1.0) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(
                f"error feedback cannot decay by {decay}", hint="Give a decay from 0 to 1, such as 0.95."
            )
        self.decay = decay
        self._residuals: dict[str, torch.Tensor] = {}

    def compensated(self, flat: torch.Tensor, parts: Sequence[FeedbackPart]) -> torch.Tensor:
        """A new tensor: the given one with the residuals of its parts."""
        result = torch.empty_like(flat)
        first = 0
        for part in parts:
            last = first + part.numel
            residual = self._residuals.get(part.name)
            if residual is None:
                result[first:last].copy_(flat[first:last])
            elif residual.numel() != part.numel:
                raise RunError(
                    f"the residual of {part.name!r} has {residual.numel()} numbers, the tensor {part.numel}",
                    hint=_FORGET,
                )
            else:
                residual = residual.to(flat.device)
                torch.add(flat[first:last], residual, alpha=self.decay, out=result[first:last])
            first = last
        return result

    def keep(self, residual: torch.Tensor, parts: Sequence[FeedbackPart]) -> None:
        """The new residuals, once the step counts. The tensor belongs to the feedback from now on."""
        pieces = torch.split(residual, [part.numel for part in parts])
        self._residuals |= {part.name: piece for part, piece in zip(parts, pieces, strict=True)}

    def encode(self, codec: Codec, tensor: torch.Tensor, turn: CodecRound) -> Encoded:
        """For one receiver: `keep(encoded.residual, [Part(turn.name, tensor.shape)])` when it has arrived."""
        residual = self.compensated(
            as_flat(tensor, turn.name), [FeedbackPart(turn.name, tuple(tensor.shape))]
        )
        payload = codec.encode(residual, turn)
        codec.add(residual, payload, turn, sign=-1.0)
        return Encoded(payload, residual)

    def forget(self) -> None:
        self._residuals.clear()

    def state_dict(self) -> dict[str, Any]:
        """A copy, of plain dicts, floats and tensors."""
        residuals = {name: one.detach().cpu().clone() for name, one in self._residuals.items()}
        return {"decay": self.decay, "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residuals = state.get("residuals")
        if not isinstance(residuals, Mapping) or not all(map(_is_residual, residuals.items())):
            raise RunError("what was loaded is not the state of an error feedback", hint=_FORGET)
        self.decay = ErrorFeedback(float(state.get("decay", self.decay))).decay
        self._residuals = {name: one.clone() for name, one in residuals.items()}


def _is_residual(item: tuple[object, object]) -> bool:
    name, one = item
    return (
        isinstance(name, str)
        and isinstance(one, torch.Tensor)
        and one.dtype == torch.float32
        and one.dim() == 1
        and bool(torch.isfinite(one).all())
    )
