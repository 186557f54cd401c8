"""Linear layers of a frozen base whose weights are held in fewer bits, with scales.

- ``int8``: one byte for each number, and a scale for each row.
- ``nf4``: half a byte for each number, and a scale for 64 of them, by bitsandbytes.

A weight is widened for a moment in the forward pass, and again in the backward pass. So only the narrow one
is held while a step is computed.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from barnraise.core.errors import RunError
from barnraise.training.pipeline.row_scales import SCALE, narrow_rows

BaseForm = Literal["exact", "int8", "nf4"]
BASE_FORMS: tuple[BaseForm, ...] = ("exact", "int8", "nf4")
_GROUP = 64  # numbers of NF4 that share a scale
_NF4 = "nf4"


class _Held(NamedTuple):
    """Shape and type of what a layer holds of its weight: numbers and scales."""

    numbers: tuple[tuple[int, ...], torch.dtype]
    scales: tuple[tuple[int, ...], torch.dtype]


class NarrowLinear(nn.Linear):
    """Linear layer whose frozen weight follows from ``weight`` and ``weight_scale``."""

    weight_scale: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result = self.product(input)
        bias: torch.Tensor | None = self.bias
        return result if bias is None else result + bias

    def product(self, values: torch.Tensor) -> torch.Tensor:
        """Return the product of activations and the weight."""
        raise NotImplementedError

    @staticmethod
    def can_hold(layer: nn.Linear) -> bool:
        """Tell whether a layer's weight has this form without a remainder."""
        return True

    @staticmethod
    def held(layer: nn.Linear) -> _Held:
        """Return what is held of a layer's weight."""
        raise NotImplementedError

    @staticmethod
    def narrow(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers and the scales that stand for a weight."""
        raise NotImplementedError


class Int8Linear(NarrowLinear):
    """Linear layer with a byte for each number of its weight, and a scale for each row."""

    def product(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Int8Product.apply(  # type: ignore[no-untyped-call]
            values, self.weight, self.weight_scale
        )
        return result

    @staticmethod
    def held(layer: nn.Linear) -> _Held:
        return _Held((tuple(layer.weight.shape), torch.int8), ((layer.out_features, 1), SCALE))

    @staticmethod
    def narrow(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return narrow_rows(weight)


class Nf4Linear(NarrowLinear):
    """Linear layer with half a byte for each number of its weight."""

    def product(self, values: torch.Tensor) -> torch.Tensor:
        shape = (self.out_features, self.in_features)
        result: torch.Tensor = _Nf4Product.apply(  # type: ignore[no-untyped-call]
            values, self.weight, self.weight_scale, shape
        )
        return result

    @staticmethod
    def can_hold(layer: nn.Linear) -> bool:
        return layer.in_features % _GROUP == 0

    @staticmethod
    def held(layer: nn.Linear) -> _Held:
        count = layer.out_features * layer.in_features
        return _Held(((count // 2, 1), torch.uint8), ((count // _GROUP,), SCALE))

    @staticmethod
    def narrow(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = torch.ops.bitsandbytes.quantize_4bit.default(
            weight.detach().to(SCALE).contiguous(), _GROUP, _NF4, torch.uint8
        )
        return numbers, scales


class _Int8Product(torch.autograd.Function):
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


class _Nf4Product(torch.autograd.Function):
    """The same product with half a byte for each number."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.shape = shape
        return nn.functional.linear(values, _widened(weight, scale, shape, values.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        [gradient] = gradients
        return gradient @ _widened(weight, scale, ctx.shape, gradient.dtype), None, None, None


def _widened(
    weight: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    wide: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        weight, scale, _GROUP, _NF4, shape, dtype
    )
    return wide


def narrow_linear_layers(model: nn.Module, blocks: nn.Module, form: BaseForm) -> None:
    """Turn the frozen linear layers of a model's blocks into narrow ones without memory, in place.

    Raise RunError if there is none, or if adapters read the weights, or if a library is missing.
    """
    if any(any(getattr(module, "use_dora", {}).values()) for module in blocks.modules()):
        raise RunError(
            f"DoRA reads the weights of the base, which a base in {form} does not have",
            hint="Leave use_dora out, or take base='exact'.",
        )
    kind: type[NarrowLinear] = Int8Linear
    if form == "nf4":
        _load_bitsandbytes()
        kind = Nf4Linear
    places = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    frozen = [
        module
        for module in blocks.modules()
        if type(module) is nn.Linear and not module.weight.requires_grad and places[id(module.weight)] == 1
    ]
    fitting = [layer for layer in frozen if kind.can_hold(layer)]
    if not fitting:
        what = (
            "frozen linear layer" if not frozen else f"frozen linear layer with {_GROUP} inputs or a multiple"
        )
        raise RunError(
            f"base={form!r} found no {what} in the blocks",
            hint="Train adapters such as LoRA on it, or take base='exact'.",
        )
    for layer in fitting:
        held = kind.held(layer)
        layer.weight = _empty(*held.numbers)
        layer.register_parameter("weight_scale", _empty(*held.scales))
        layer.__class__ = kind


def _load_bitsandbytes() -> None:
    """Import what computes with NF4, which adds its operations to torch."""
    # At its import it warns that optional kernels are missing, which are not used here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise RunError(
            f"base='nf4' needs bitsandbytes, which cannot be imported here: {error}",
            hint="Install it on every machine: pip install bitsandbytes",
        ) from error


def weight_of_scale(module: nn.Module, leaf: str) -> str:
    """Return the parameter of a module from whose stored tensor another one is computed, or that itself."""
    return "weight" if isinstance(module, NarrowLinear) and leaf == "weight_scale" else leaf


def narrowed(module: nn.Module, leaf: str, value: torch.Tensor) -> torch.Tensor:
    """Return what a parameter of a module has, if this value of ``weight`` or ``bias`` is stored."""
    if not isinstance(module, NarrowLinear) or leaf == "bias":
        return value
    numbers, scales = module.narrow(value)
    return numbers if leaf == "weight" else scales


def stored_numbers(module: nn.Module, leaf: str) -> int:
    """Return how many numbers a parameter of a module stands for; none for scales."""
    if isinstance(module, NarrowLinear) and leaf != "bias":
        return module.in_features * module.out_features if leaf == "weight" else 0
    return module.get_parameter(leaf).numel()


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
