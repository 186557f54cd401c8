"""Models of Transformers, with and without LoRA: a chain of stages equals the whole model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from barnraise.core.errors import RunError
from barnraise.training.pipeline.empty_weights import empty_weights
from barnraise.training.pipeline.outline import find_blocks, trace_outline
from barnraise.training.pipeline.split_training import loss_of_output
from barnraise.training.pipeline.stage import Stage
from barnraise.training.pipeline.weights import StageWeights, WeightFiles

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

pytestmark = pytest.mark.slow

LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NEOX = {name: value for name, value in LLAMA_LIKE.items() if name != "num_key_value_heads"}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "Llama": LLAMA_LIKE,
    "Qwen2": LLAMA_LIKE,
    "Qwen3": {**LLAMA_LIKE, "head_dim": 8},
    "Mistral": LLAMA_LIKE,
    "Gemma2": {**LLAMA_LIKE, "head_dim": 8},
    "GPT2": {**GPT2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "GPTNeoX": NEOX,
    "Phi3": LLAMA_LIKE,
}
IDS = torch.randint(1, 128, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :2] = 0
INPUTS = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}


def empty_model(kind: str, *, is_lora: bool, recomputes: bool = False) -> Any:
    with empty_weights():
        config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
        model = transformers.AutoModelForCausalLM.from_config(config)
    if is_lora:
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
    if recomputes:
        model.gradient_checkpointing_enable()
    return model.train()


def write_weights(kind: str, folder: Path) -> Path:
    """Write the model as Transformers does, in several files, and return the folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="40KB")
    return folder


def chain(
    kind: str, folder: Path, cuts: tuple[int, ...], **form: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a chain of stages in one process."""
    passes: list[tuple[Any, torch.Tensor | None, torch.Tensor]] = []
    received = None
    for first, end in pairwise(cuts):
        model = empty_model(kind, **form)
        outline = trace_outline(model, find_blocks(model), loss_of_output, INPUTS)
        StageWeights(model, WeightFiles(folder), 0, torch.device("cpu")).load(outline.names(first, end))
        result = Stage(model, outline, first, end, loss_of_output)(received, INPUTS)
        passes.append((model, received, result))
        received = result.detach().requires_grad_()
    gradient = None
    gradients: dict[str, torch.Tensor] = {}
    for model, own, result in reversed(passes):
        if result.requires_grad:
            torch.autograd.backward(result, gradient)
        gradient = own.grad if own is not None else None
        gradients |= {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return passes[-1][2].item(), gradients


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "GPTNeoX"])
def test_stages_with_lora_equal_the_whole_model(kind: str, tmp_path: Path) -> None:
    folder = write_weights(kind, tmp_path)
    loss, gradients = chain(kind, folder, (0, 4), is_lora=True)
    split_loss, split_gradients = chain(kind, folder, (0, 1, 3, 4), is_lora=True)
    assert gradients.keys() == split_gradients.keys()
    assert split_loss == loss
    assert all(torch.equal(gradients[name], split_gradients[name]) for name in gradients)


def test_stages_with_gradient_checkpointing_equal_those_without(tmp_path: Path) -> None:
    folder = write_weights("Llama", tmp_path)
    loss, gradients = chain("Llama", folder, (0, 4), is_lora=True)
    split_loss, split_gradients = chain("Llama", folder, (0, 2, 4), is_lora=True, recomputes=True)
    assert split_loss == loss
    assert all(torch.equal(gradients[name], split_gradients[name]) for name in gradients)


def test_files_with_other_names_than_the_model_are_refused(tmp_path: Path) -> None:
    """Transformers renames the head of this model when it writes and reads files."""
    with pytest.raises(RunError, match=r"files lack .*lm_head\.weight"):
        chain("GPTNeoX", write_weights("GPTNeoX", tmp_path), (0, 2, 4), is_lora=True)


def test_blocks_with_two_results_are_refused() -> None:
    with empty_weights():
        config = transformers.BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=128)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(RunError, match="returns more than one tensor"):
        trace_outline(model, find_blocks(model), loss_of_output, INPUTS)
