"""Error feedback: the encoding error of a tensor is added to it in the next round.

Each member has one residual for each named tensor. It is saved and loaded with that member, and a joining
member starts without residuals. A copy of another member's residual would count that member's errors twice.
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
    """A named tensor within a flat one. Parts lie one after the other."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Encoded(NamedTuple):
    """A payload and its encoding error."""

    payload: torch.Tensor
    residual: torch.Tensor


class ErrorFeedback:
    """Residuals of encoding by tensor name. ``decay`` below 1 reduces old errors.

    A decay of 0.95 suits sparse codecs with local steps. Nothing changes until `keep`: a failed step that
    is repeated starts from the same residuals.
    """

    def __init__(self, decay: float = 1.0) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(
                f"error feedback cannot decay by {decay}", hint="Give a decay from 0 to 1, such as 0.95."
            )
        self.decay = decay
        self._residuals: dict[str, torch.Tensor] = {}

    def compensated(self, flat: torch.Tensor, parts: Sequence[FeedbackPart]) -> torch.Tensor:
        """Return a new tensor: the given one plus the residuals of its parts."""
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
        """Store the new residuals after the step was committed. This takes ownership of the tensor."""
        residuals = torch.split(residual, [part.numel for part in parts])
        self._residuals |= {
            part.name: part_residual for part, part_residual in zip(parts, residuals, strict=True)
        }

    def encode(self, codec: Codec, tensor: torch.Tensor, codec_round: CodecRound) -> Encoded:
        """Encode a tensor for one receiver.

        After it has arrived, call `keep(encoded.residual, [FeedbackPart(codec_round.name, tensor.shape)])`.
        """
        residual = self.compensated(
            as_flat(tensor, codec_round.name), [FeedbackPart(codec_round.name, tuple(tensor.shape))]
        )
        payload = codec.encode(residual, codec_round)
        codec.add(residual, payload, codec_round, sign=-1.0)
        return Encoded(payload, residual)

    def forget(self) -> None:
        self._residuals.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state as plain dicts, floats and tensors."""
        residuals = {name: residual.detach().cpu().clone() for name, residual in self._residuals.items()}
        return {"decay": self.decay, "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residuals = state.get("residuals")
        if not isinstance(residuals, Mapping) or not all(map(_is_residual, residuals.items())):
            raise RunError("the loaded state does not belong to error feedback", hint=_FORGET)
        self.decay = ErrorFeedback(float(state.get("decay", self.decay))).decay
        self._residuals = {name: residual.clone() for name, residual in residuals.items()}


def _is_residual(item: tuple[object, object]) -> bool:
    name, residual = item
    return (
        isinstance(name, str)
        and isinstance(residual, torch.Tensor)
        and residual.dtype == torch.float32
        and residual.dim() == 1
        and bool(torch.isfinite(residual).all())
    )
