"""Deterministic sums: the bits do not depend on the processor, the number of threads or the library.

torch adds in as many SIMD lanes as the processor has. Here the second half of the rows is added to the
first, repeatedly. Each addition is one of single numbers, in an order that follows from the number of rows
alone.
"""

from __future__ import annotations

import torch


def sum_rows(values: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension. The contents of ``values`` are destroyed."""
    left = values.shape[0]
    if not left:
        return values.new_zeros(values.shape[1:])
    while left > 1:
        half = (left + 1) // 2
        values[: left - half].add_(values[half:left])
        left = half
    return values[0]
