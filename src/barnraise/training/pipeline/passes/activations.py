"""Form in which activations and their gradients travel between machines.

``int8`` has one scale for each row, which is one token in a transformer. Only what travels is changed: the
machine that receives it computes with the type of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

Activations = Literal["exact", "bf16", "int8"]
ACTIVATIONS: tuple[Activations, ...] = ("exact", "bf16", "int8")

_LARGEST = 127
_SCALE = torch.float32


class ActivationCodec(NamedTuple):
    """Form of activations of a type. A type of two bytes travels as it is instead of as bfloat16."""

    dtype: torch.dtype
    kind: Activations = "exact"

    def size(self, shape: Sequence[int]) -> int:
        """Return the bytes in which activations of this shape travel."""
        return int(self.buffer(shape, "meta").nbytes)

    def buffer(self, shape: Sequence[int], device: torch.device | str) -> torch.Tensor:
        """Return memory for what `pack` returns of activations of this shape."""
        count = math.prod(shape)
        if self.kind == "int8":
            rows = count // shape[-1] if count else 0
            return torch.empty(rows * _SCALE.itemsize + count, dtype=torch.uint8, device=device)
        return torch.empty(count, dtype=self._narrow, device=device)

    def pack(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return activations in the form in which they travel; ``shape``: of these values."""
        if self.kind != "int8":
            return values.detach().to(self._narrow).reshape(-1)
        rows = values.detach().reshape(-1, shape[-1]).to(_SCALE)
        scales = rows.abs().amax(1, keepdim=True).div(_LARGEST).clamp_min(torch.finfo(_SCALE).tiny)
        numbers = (rows / scales).round_().to(torch.int8)
        # The scales come first, so that they begin at a multiple of their size.
        return torch.cat([scales.view(-1).view(torch.uint8), numbers.view(-1).view(torch.uint8)])

    def unpack(self, packed: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> None:
        """Write into ``values`` what another machine has packed. A row with a NaN or infinity becomes NaN."""
        if self.kind == "int8":
            rows = math.prod(shape) // shape[-1]
            scales = packed[: rows * _SCALE.itemsize].view(_SCALE).view(rows, 1)
            numbers = packed[rows * _SCALE.itemsize :].view(torch.int8).view(rows, shape[-1])
            packed = (numbers * scales).view(-1)
        values.detach().copy_(packed.view(values.shape))

    @property
    def is_exact(self) -> bool:
        """Return True if activations travel as they are."""
        return self.kind != "int8" and self._narrow == self.dtype

    @property
    def _narrow(self) -> torch.dtype:
        return torch.bfloat16 if self.kind == "bf16" and self.dtype.itemsize > 2 else self.dtype
