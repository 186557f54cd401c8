"""Memory of activations, measured without memory, against that of a real forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from barnraise.planning.split.stage_placement import ModelParts, PartSize
from barnraise.training.pipeline.outline import find_blocks
from barnraise.training.pipeline.prediction.kept_activations import KeptBytes, measure_kept, with_kept
from barnraise.training.pipeline.split_training import loss_of_output
from tests.unit.training.pipeline.test_outline import INPUTS, empty_model, new_model


def kept_in_reality(model: Any, block: Any) -> int:
    """Return the bytes that a block keeps for the backward pass, without its parameters."""
    known = {value.untyped_storage().data_ptr() for value in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks: list[Any] = []
    context = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    hooks.append(block.register_forward_pre_hook(lambda *_: context.__enter__()))
    hooks.append(block.register_forward_hook(lambda *_: context.__exit__()))
    loss_of_output(model, INPUTS)
    for hook in hooks:
        hook.remove()
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in known)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_kept_bytes_are_those_of_a_real_pass(kind: str) -> None:
    real = new_model(kind).train()
    path = find_blocks(real)
    blocks = list(real.get_submodule(path).children())
    expected = kept_in_reality(real, blocks[1])
    measured = measure_kept(real, path, loss_of_output, INPUTS)
    assert expected > 0
    assert measured.block == pytest.approx(expected, rel=0.1)
    assert measured.after > 0


def test_recomputed_blocks_keep_little() -> None:
    whole = empty_model("Llama", is_lora=True)
    kept = measure_kept(whole, find_blocks(whole), loss_of_output, INPUTS)
    again = empty_model("Llama", is_lora=True, recomputes=True)
    recomputed = measure_kept(again, find_blocks(again), loss_of_output, INPUTS)
    assert recomputed.block < kept.block / 4


def test_block_keeps_at_least_what_it_receives() -> None:
    parts = ModelParts(PartSize(1), (PartSize(2), PartSize(3)), PartSize(4), 50)
    assert [each.activation_bytes for each in with_kept(parts, KeptBytes(10, 7)).blocks] == [50, 50]
    assert with_kept(parts, KeptBytes(80, 7)).after.activation_bytes == 7
    assert with_kept(parts, KeptBytes(80, 7)).blocks[0].activation_bytes == 80
