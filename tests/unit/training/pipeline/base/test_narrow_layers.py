"""Frozen layers in int8 and NF4: their products, what the backward pass needs, and how they are loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from barnraise.core.errors import RunError
from barnraise.training.pipeline.base.narrow_layers import Int8Linear, Nf4Linear, narrow_linear_layers
from barnraise.training.pipeline.empty_weights import empty_weights
from barnraise.training.pipeline.outline import find_blocks, trace_outline
from barnraise.training.pipeline.row_scales import narrow_rows
from barnraise.training.pipeline.split_training import loss_of_output, measure_parts
from barnraise.training.pipeline.weights import StageWeights, WeightFiles
from tests.unit.training.pipeline.block_model import BLOCKS, WIDTH, BlockModel, collate, write_base

INPUTS = collate([{"ids": torch.tensor([3, 1, 4, 1, 5])}, {"ids": torch.tensor([9, 2, 6])}])


def narrow_model() -> BlockModel:
    with empty_weights():
        model = BlockModel()
    narrow_linear_layers(model, model.layers, "int8")
    return model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_base(tmp_path / "base")
    return tmp_path / "base"


def layer_of(dtype: torch.dtype) -> tuple[Int8Linear, torch.Tensor]:
    """Return a layer with a random weight, and the weight that it stands for."""
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    layer: Any = nn.Linear(8, 5).requires_grad_(False)
    narrow_linear_layers(layer, nn.ModuleList([layer]), "int8")
    numbers, scales = narrow_rows(weight)
    layer.weight = nn.Parameter(numbers, requires_grad=False)
    layer.weight_scale = nn.Parameter(scales, requires_grad=False)
    layer.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)
    return layer, numbers * scales


def test_product_and_gradient_are_those_of_the_widened_weight() -> None:
    layer, weight = layer_of(torch.float32)
    values = torch.randn(3, 2, 8, requires_grad=True)
    other = values.detach().clone().requires_grad_()
    expected = nn.functional.linear(other, weight, layer.bias)
    result = layer(values)
    assert torch.allclose(result, expected, atol=1e-6)
    gradient = torch.randn_like(result)
    result.backward(gradient)
    expected.backward(gradient)
    assert values.grad is not None
    assert other.grad is not None
    assert torch.allclose(values.grad, other.grad, atol=1e-6)


def test_result_has_the_type_of_the_activations() -> None:
    layer, weight = layer_of(torch.bfloat16)
    values = torch.randn(3, 8).bfloat16().requires_grad_()
    result = layer(values)
    assert result.dtype == torch.bfloat16
    assert torch.allclose(result.float(), values.float() @ weight.T + layer.bias.float(), atol=0.1)
    result.sum().backward()
    assert values.grad is not None
    assert values.grad.dtype == torch.bfloat16


def test_no_wide_weight_is_kept_for_the_backward_pass() -> None:
    layer, _ = layer_of(torch.float32)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(3, 8, requires_grad=True))
    assert {(tuple(each.shape), each.dtype) for each in kept} == {
        ((5, 8), torch.int8),
        ((5, 1), torch.float32),
    }


def test_only_frozen_layers_of_the_blocks_are_narrow() -> None:
    model = narrow_model()
    narrow = {name for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    assert narrow == {f"layers.{number}.base" for number in range(BLOCKS)}
    assert model.layers[0].low.weight.requires_grad
    assert type(model.head) is nn.Linear


def test_memory_of_a_narrow_base_is_what_is_held(base: Path) -> None:
    model = narrow_model()
    parts = measure_parts(model, trace_outline(model, find_blocks(model), loss_of_output, INPUTS))
    block = parts.blocks[0]
    norm_and_bias = 3 * WIDTH * 4
    assert block.frozen_bytes == WIDTH * WIDTH + 4 * WIDTH + norm_and_bias


def test_weights_are_narrowed_as_they_are_read(base: Path) -> None:
    model = narrow_model()
    outline = trace_outline(model, find_blocks(model), loss_of_output, INPUTS)
    StageWeights(model, WeightFiles(base), 0, torch.device("cpu")).load(outline.names(1, 3))
    layer = model.layers[1].base
    stored = {name: value for path in base.glob("*") for name, value in load_file(path).items()}
    original = stored["layers.1.base.weight"]
    assert layer.weight.dtype == torch.int8
    assert (layer.weight * layer.weight_scale - original).abs().max() <= original.abs().max() / 127
    assert torch.equal(layer.bias, stored["layers.1.base.bias"])
    assert model.layers[0].base.weight.is_meta


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_stored_weights_of_one_byte_are_refused(dtype: torch.dtype, base: Path) -> None:
    """A quantized file has scales of its own, without which its numbers mean nothing."""
    with empty_weights():
        model = BlockModel()
    for path in base.glob("*"):
        path.unlink()
    save_file({"embed.weight": torch.zeros(17, WIDTH).to(dtype)}, base / "model.safetensors")
    with pytest.raises(RunError, match=r"embed\.weight has one byte for each number"):
        StageWeights(model, WeightFiles(base), 0, torch.device("cpu")).load(["embed.weight"])


class _Adapted(nn.Linear):
    use_dora: dict[str, bool]


def test_bases_that_cannot_be_narrow_are_refused() -> None:
    model = BlockModel()
    adapted = _Adapted(2, 2)
    adapted.use_dora = {"default": True}
    with pytest.raises(RunError, match="DoRA reads the weights"):
        narrow_linear_layers(model, nn.ModuleList([adapted]), "int8")
    for parameter in model.parameters():
        parameter.requires_grad_()
    with pytest.raises(RunError, match="no frozen linear layer"):
        narrow_linear_layers(model, model.layers, "int8")


def test_tied_weight_stays_wide() -> None:
    model = BlockModel()
    model.layers[0].base.weight = model.layers[1].base.weight
    narrow_linear_layers(model, model.layers, "int8")
    assert [isinstance(block.base, Int8Linear) for block in model.layers] == [False, False, True, True, True]


def nf4_layer(dtype: torch.dtype) -> tuple[Nf4Linear, torch.Tensor]:
    """Return a layer with a random weight, and that weight."""
    weight = torch.randn(10, 128, generator=torch.Generator().manual_seed(0))
    layer: Any = nn.Linear(128, 10).requires_grad_(False)
    narrow_linear_layers(layer, nn.ModuleList([layer]), "nf4")
    numbers, scales = Nf4Linear.narrow(weight)
    assert (numbers.shape, numbers.dtype) == (layer.weight.shape, layer.weight.dtype)
    assert (scales.shape, scales.dtype) == (layer.weight_scale.shape, layer.weight_scale.dtype)
    layer.weight = nn.Parameter(numbers, requires_grad=False)
    layer.weight_scale = nn.Parameter(scales, requires_grad=False)
    layer.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)
    return layer, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_takes_half_a_byte_and_its_products_are_those_of_the_rounded_weight(dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    layer, weight = nf4_layer(dtype)
    assert layer.weight.nbytes == weight.numel() // 2
    assert layer.weight_scale.nbytes == 4 * weight.numel() // 64
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    rounded = (layer(torch.eye(128, dtype=dtype)) - layer.bias).T  # row by row
    error = (rounded.float() - weight).abs()
    assert 0.01 < error.mean() < 0.1  # of values around one
    values = torch.randn(3, 2, 128).to(dtype).requires_grad_()
    result = layer(values)
    assert result.dtype == dtype
    expected = nn.functional.linear(values, rounded, layer.bias)
    assert torch.allclose(result, expected, atol=tolerance)
    gradient = torch.randn_like(result)
    result.backward(gradient)
    assert values.grad is not None
    assert torch.allclose(values.grad, gradient @ rounded, atol=tolerance)


def test_layer_whose_rows_are_no_multiple_of_a_group_stays_wide() -> None:
    pytest.importorskip("bitsandbytes")
    model = nn.ModuleList([nn.Linear(128, 3), nn.Linear(100, 3)]).requires_grad_(False)
    narrow_linear_layers(model, model, "nf4")
    assert [type(layer) for layer in model] == [Nf4Linear, nn.Linear]
    with pytest.raises(RunError, match="no frozen linear layer with 64 inputs"):
        narrow_linear_layers(model, nn.ModuleList([model[1]]), "nf4")


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = BlockModel()
    with pytest.raises(RunError, match="needs bitsandbytes") as caught:
        narrow_linear_layers(model, model.layers, "nf4")
    assert "pip install" in (caught.value.hint or "")
