"""A member's own gradients within a round: what its next local step is taken with."""

from __future__ import annotations

import torch

from barnraise.training.gradients.reducer import GradientReducer, clipping, wide


class GradientAccumulator:
    """The mean of the units since the last local step, by weight. One unit alone is not copied."""

    def __init__(self, sums: GradientReducer) -> None:
        self._sums = sums
        self._found: dict[int, torch.Tensor] = {}
        self._weight = 0.0
        self._is_mean = True  # of one unit: not yet multiplied by its weight

    @property
    def is_empty(self) -> bool:
        return not self._weight

    def take(self, weight: float) -> None:
        """The gradients that backward has left, which are means over a unit or a part of one."""
        came = self._sums.collect()
        if not weight:  # nothing, also if it is NaN
            return
        if self.is_empty:
            self._found, self._weight, self._is_mean = dict(came), weight, True
            return
        if self._is_mean:
            self._is_mean = False
            self._found = {number: wide(one).mul_(self._weight) for number, one in self._found.items()}
        for number, gradient in came:
            if number in self._found:
                self._found[number].add_(gradient, alpha=weight)
            else:
                self._found[number] = wide(gradient).mul_(weight)
        self._weight += weight

    def give(self, clip: float | None) -> float:
        """Each parameter gets its mean gradient, as a whole clipped; returns the weight. Nothing is left."""
        weight, found = self._weight, self._found
        if not self._is_mean:
            for one in found.values():
                one.mul_(1.0 / weight)
        factor = clipping(found.values(), clip)
        for number, one in found.items():
            parameter = self._sums.parameters[number]
            parameter.grad = (one if factor == 1.0 else one * factor).to(parameter.dtype)
        self.clear()
        return weight

    def clear(self) -> None:
        self._found, self._weight, self._is_mean = {}, 0.0, True
