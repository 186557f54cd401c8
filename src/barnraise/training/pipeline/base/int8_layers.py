"""Linear layers of a frozen base with one byte for each number of their weights, and a scale for each row.

The weight is widened for a moment in the forward pass, and again in the backward pass. So it takes a half of
bfloat16's memory also while a step is computed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import torch
from torch import nn

from barnraise.core.errors import RunError
from barnraise.training.pipeline.row_scales import SCALE, narrow_rows

BaseForm = Literal["exact", "int8"]
BASE_FORMS: tuple[BaseForm, ...] = ("exact", "int8")


class Int8Linear(nn.Linear):
    """Linear layer whose frozen weight is the product of ``weight`` and ``weight_scale``."""

    weight_scale: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _WideProduct.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.weight_scale
        )
        bias: torch.Tensor | None = self.bias
        return result if bias is None else result + bias


class _WideProduct(torch.autograd.Function):
    """Product with a widened weight, of which only the narrow one is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        wide = nn.functional.linear(values, weight.to(values.dtype))
        return (wide * scale.view(-1)).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        [gradient] = gradients
        scaled = (gradient * scale.view(-1)).to(gradient.dtype)
        return scaled @ weight.to(gradient.dtype), None, None


def narrow_linear_layers(model: nn.Module, blocks: nn.Module) -> None:
    """Turn the frozen linear layers of a model's blocks into narrow ones without memory, in place.

    Raise RunError if there is none, or if adapters read the weights.
    """
    if any(any(getattr(module, "use_dora", {}).values()) for module in blocks.modules()):
        raise RunError(
            "DoRA reads the weights of the base, which a base in int8 does not have",
            hint="Leave use_dora out, or take base='exact'.",
        )
    places = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    frozen = [
        module
        for module in blocks.modules()
        if type(module) is nn.Linear and not module.weight.requires_grad and places[id(module.weight)] == 1
    ]
    if not frozen:
        raise RunError(
            "base='int8' found no frozen linear layer in the blocks",
            hint="Train adapters such as LoRA on it, or take base='exact'.",
        )
    for layer in frozen:
        rows = len(layer.weight)
        layer.weight = _empty(layer.weight.shape, torch.int8)
        layer.register_parameter("weight_scale", _empty((rows, 1), SCALE))
        layer.__class__ = Int8Linear


def weight_of_scale(module: nn.Module, leaf: str) -> str:
    """Return the parameter of a module from whose stored tensor another one is computed, or that itself."""
    return "weight" if isinstance(module, Int8Linear) and leaf == "weight_scale" else leaf


def narrowed(module: nn.Module, leaf: str, value: torch.Tensor) -> torch.Tensor:
    """Return what a parameter of a module has, if this value of ``weight`` or ``bias`` is stored."""
    if not isinstance(module, Int8Linear) or leaf == "bias":
        return value
    numbers, scales = narrow_rows(value)
    return numbers if leaf == "weight" else scales


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
