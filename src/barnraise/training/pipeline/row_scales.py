"""Numbers of one byte with a scale for each row."""

from __future__ import annotations

import torch

LARGEST = 127
SCALE = torch.float32


def narrow_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in int8, and a column of scales: their product is about the matrix.

    A row with a NaN or infinity gets such a scale, so its product is not finite either.
    """
    rows = rows.detach().to(SCALE)
    scales = rows.abs().amax(1, keepdim=True).div_(LARGEST).clamp_min_(torch.finfo(SCALE).tiny)
    return (rows / scales).round_().to(torch.int8), scales
