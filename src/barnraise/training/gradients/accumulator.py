"""Gradient accumulator of one worker: the gradient for its next local step (LocalSGD)."""

from __future__ import annotations

import torch

from barnraise.training.gradients.reducer import GradientReducer, clip_factor, to_sum_dtype


class GradientAccumulator:
    """Weighted mean of the micro-batches since the last local step. A single micro-batch is not copied."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._gradients: dict[int, torch.Tensor] = {}
        self._weight = 0.0
        self._is_mean = True  # a single micro-batch, not yet multiplied by its weight

    @property
    def is_empty(self) -> bool:
        return not self._weight

    def add_microbatch(self, weight: float) -> None:
        """Add the gradients of a micro-batch or of a part of one, which are means."""
        gradients = self._reducer.take_gradients()
        if not weight:  # ignored, because it may be NaN
            return
        if self.is_empty:
            self._gradients, self._weight, self._is_mean = dict(gradients), weight, True
            return
        if self._is_mean:
            self._is_mean = False
            self._gradients = {
                number: to_sum_dtype(gradient).mul_(self._weight)
                for number, gradient in self._gradients.items()
            }
        for number, gradient in gradients:
            if number in self._gradients:
                self._gradients[number].add_(gradient, alpha=weight)
            else:
                self._gradients[number] = to_sum_dtype(gradient).mul_(weight)
        self._weight += weight

    def write_grads(self, clip: float | None) -> float:
        """Write the clipped mean to ``parameter.grad``, clear the accumulator, and return the weight."""
        weight, gradients = self._weight, self._gradients
        if not self._is_mean:
            for gradient in gradients.values():
                gradient.mul_(1.0 / weight)
        factor = clip_factor(gradients.values(), clip)
        for number, gradient in gradients.items():
            parameter = self._reducer.parameters[number]
            parameter.grad = (gradient if factor == 1.0 else gradient * factor).to(parameter.dtype)
        self.clear()
        return weight

    def clear(self) -> None:
        """Drop what was accumulated."""
        self._gradients, self._weight, self._is_mean = {}, 0.0, True
