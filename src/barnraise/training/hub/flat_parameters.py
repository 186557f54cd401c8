"""Flat parameters: all exchanged tensors of a model as one float32 vector, and back."""

from __future__ import annotations

import torch

from barnraise.runs.sharding import DataOrder
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.hub.parameter_server import ModelSpec, ParameterEntry
from barnraise.training.state.model_tensors import tensors_of


class FlatParameters:
    """Trained parameters and floating-point buffers of a model, as one vector."""

    def __init__(self, model: torch.nn.Module, reducer: GradientReducer) -> None:
        self._tensors = _exchanged_tensors(model, reducer)
        self._sizes = [tensor.numel() for _, tensor in self._tensors]
        self.size = sum(self._sizes)

    def spec(self, order: DataOrder) -> ModelSpec:
        """Return what the hub compares between groups."""
        layout = tuple(
            ParameterEntry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors
        )
        return ModelSpec(layout, order.samples, order.batch, order.seed, order.shuffle, order.drop_last)

    def read(self) -> torch.Tensor:
        """Return the model's current values."""
        flat = torch.empty(self.size, dtype=torch.float32)
        for part, (_, tensor) in zip(torch.split(flat, self._sizes), self._tensors, strict=True):
            part.copy_(tensor.detach().reshape(-1))
        return flat

    def change(self, base: torch.Tensor) -> torch.Tensor:
        """Return ``base``, as the model was written from it, minus the model's current values."""
        flat = torch.empty(self.size, dtype=torch.float32)
        both = zip(torch.split(flat, self._sizes), torch.split(base, self._sizes), strict=True)
        for (part, before), (_, tensor) in zip(both, self._tensors, strict=True):
            now = tensor.detach().reshape(-1).cpu()
            wide = torch.promote_types(now.dtype, torch.float32)
            part.copy_(before.to(now.dtype).to(wide) - now.to(wide))
        return flat

    def write(self, flat: torch.Tensor) -> None:
        """Write a vector into the model."""
        with torch.no_grad():
            for part, (_, tensor) in zip(torch.split(flat, self._sizes), self._tensors, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _exchanged_tensors(model: torch.nn.Module, reducer: GradientReducer) -> list[tuple[str, torch.Tensor]]:
    """Return the trained parameters and the statistics that follow from them.

    The other tensors are equal everywhere. All trained parameters are in the model's state, which
    `validation.checks` ensures.
    """
    trained = {id(parameter) for parameter in reducer.parameters}
    tensors = tensors_of(model, keep_vars=True)
    chosen = [
        (name, tensor) for name, tensor in tensors.items() if id(tensor) in trained or _is_statistic(tensor)
    ]
    unique: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in chosen:
        unique.setdefault(id(tensor), (name, tensor))
    return list(unique.values())


def _is_statistic(tensor: torch.Tensor) -> bool:
    """Return True for a buffer that training may move. A buffer with infinities is a mask."""
    is_buffer = tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)
    return is_buffer and bool(tensor.isfinite().all())
