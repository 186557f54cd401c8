"""Models of Transformers, with and without LoRA: a chain of stages equals the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from barnraise.core.errors import RunError
from barnraise.training.pipeline.base.narrow_layers import BaseForm, narrow_linear_layers
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
HEADS = {**LLAMA_LIKE, "head_dim": 8}
WINDOW = {**LLAMA_LIKE, "sliding_window": 4}
NEOX = {name: value for name, value in LLAMA_LIKE.items() if name != "num_key_value_heads"}
SMALL = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {**SMALL, "n_embd": 32, "n_layer": 4, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {**LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": LLAMA_LIKE,
    "Qwen2": LLAMA_LIKE,
    "Qwen3": HEADS,
    "Mistral": LLAMA_LIKE,
    "Gemma2": HEADS,
    "GPT2": GPT2,
    "GPTNeoX": NEOX,
    "Phi3": LLAMA_LIKE,
    "Bloom": {**SMALL, "hidden_size": 32, "n_layer": 4, "n_head": 4, "pad_token_id": 0},
    "Cohere2": WINDOW,
    "DeepseekV3": {
        **LLAMA_LIKE,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "Ernie4_5": HEADS,
    "Exaone4": WINDOW,
    "Falcon": {**SMALL, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
    "GPTBigCode": {**GPT2, "n_inner": 64},
    "GPTJ": {**GPT2, "rotary_dim": 4},
    "Gemma3Text": {**HEADS, **WINDOW, "query_pre_attn_scalar": 8},
    "Glm4": HEADS,
    "GptOss": {**HEADS, **LOCAL_EXPERTS, **WINDOW},
    "Granite": {**LLAMA_LIKE, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "GraniteMoe": LOCAL_EXPERTS,
    "HunYuanDenseV1": HEADS,
    "Ministral": {**HEADS, **WINDOW},
    "Mixtral": LOCAL_EXPERTS,
    "Mpt": {"vocab_size": 128, "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 32},
    "Nemotron": LLAMA_LIKE,
    "Olmo2": LLAMA_LIKE,
    "Olmo3": WINDOW,
    "Olmoe": {**LLAMA_LIKE, **EXPERTS},
    "Phi": NEOX,
    "Qwen3Moe": {**HEADS, **EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "Qwen3Next": {
        **HEADS,
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "SmolLM3": LLAMA_LIKE,
    "StableLm": LLAMA_LIKE,
    "Starcoder2": LLAMA_LIKE,
}
WITHOUT_DROPOUT = {"hidden_dropout": 0, "attention_dropout": 0, "residual_dropout": 0, "embedding_dropout": 0}
IDS = torch.randint(1, 128, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :2] = 0
INPUTS = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: several add the gradients of an expert in any order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def new_model(kind: str) -> Any:
    """Return a model without dropout, whose experts do not depend on the contents of tensors."""
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    for name in WITHOUT_DROPOUT.keys() & config.to_dict().keys():
        setattr(config, name, 0)
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm")


def empty_model(kind: str, *, is_lora: bool, recomputes: bool = False) -> Any:
    with empty_weights():
        model = new_model(kind)
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
    model = new_model(kind)
    trained = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        if name not in trained and value.is_floating_point():
            value.normal_()  # buffers that are stored, such as the bias of a router
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def chain(
    kind: str, folder: Path, cuts: tuple[int, ...], *, base: BaseForm = "exact", **form: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a chain of stages in one process."""
    passes: list[tuple[Any, torch.Tensor | None, torch.Tensor]] = []
    received = None
    for first, end in pairwise(cuts):
        model = empty_model(kind, **form)
        if base != "exact":
            narrow_linear_layers(model, model.get_submodule(find_blocks(model)), base)
        outline = trace_outline(model, find_blocks(model), loss_of_output, INPUTS)
        weights = StageWeights(model, WeightFiles(folder), 0, torch.device("cpu"))
        weights.load(outline.names(first, end))
        weights.load_buffers()
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


@pytest.mark.parametrize("kind", MODELS)
def test_stages_with_lora_equal_the_whole_model(kind: str, tmp_path: Path) -> None:
    folder = write_weights(kind, tmp_path)
    loss, gradients = chain(kind, folder, (0, 4), is_lora=True)
    split_loss, split_gradients = chain(kind, folder, (0, 1, 3, 4), is_lora=True)
    assert gradients.keys() == split_gradients.keys()
    assert split_loss == loss
    assert all(torch.equal(gradients[name], split_gradients[name]) for name in gradients)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Next"])
def test_stages_with_a_narrow_base_equal_the_whole_model_with_it(kind: str, tmp_path: Path) -> None:
    folder = write_weights(kind, tmp_path)
    exact, _ = chain(kind, folder, (0, 4), is_lora=True)
    check_narrow(kind, folder, "int8", exact)


def check_narrow(kind: str, folder: Path, base: BaseForm, exact: float) -> None:
    loss, gradients = chain(kind, folder, (0, 4), is_lora=True, base=base)
    split_loss, split_gradients = chain(kind, folder, (0, 1, 3, 4), is_lora=True, base=base)
    assert split_loss == loss
    assert all(torch.equal(gradients[name], split_gradients[name]) for name in gradients)
    assert 0 < abs(loss - exact) < 0.01 * exact


def test_stages_with_a_base_in_nf4_equal_the_whole_model_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    wide = {**MODELS["Llama"], "hidden_size": 64, "intermediate_size": 128}
    monkeypatch.setitem(MODELS, "Llama", wide)
    folder = write_weights("Llama", tmp_path)
    exact, _ = chain("Llama", folder, (0, 4), is_lora=True)
    check_narrow("Llama", folder, "nf4", exact)


def test_stages_with_gradient_checkpointing_equal_those_without(tmp_path: Path) -> None:
    folder = write_weights("Llama", tmp_path)
    loss, gradients = chain("Llama", folder, (0, 4), is_lora=True)
    split_loss, split_gradients = chain("Llama", folder, (0, 2, 4), is_lora=True, recomputes=True)
    assert split_loss == loss
    assert all(torch.equal(gradients[name], split_gradients[name]) for name in gradients)


@pytest.mark.parametrize("kind", MODELS)
def test_stages_without_lora_read_what_transformers_reads(kind: str, tmp_path: Path) -> None:
    """Files may have other names than the model, or a tensor for each expert."""
    folder = write_weights(kind, tmp_path)
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="batched_mm"
    )
    loss, _ = chain(kind, folder, (0, 2, 4), is_lora=False)
    assert loss == whole.train()(**INPUTS).loss.item()


@pytest.mark.parametrize(
    ("experts", "reason"), [("eager", "nonzero"), ("grouped_mm", "Expected inputs of BF16 type")]
)
def test_experts_that_cannot_be_traced_are_refused_with_a_way_out(experts: str, reason: str) -> None:
    with empty_weights():
        config = transformers.Qwen3MoeConfig(**MODELS["Qwen3Moe"])
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts)
    with pytest.raises(RunError, match=reason) as caught:
        trace_outline(model, find_blocks(model), loss_of_output, INPUTS)
    assert "experts_implementation='batched_mm'" in caught.value.hint


def test_random_numbers_that_decide_what_is_called_are_refused() -> None:
    with empty_weights():
        config = transformers.OPTConfig(
            **SMALL,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            word_embed_proj_dim=32,
        )
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    with pytest.raises(RunError, match=r"cannot be traced: aten\._local_scalar_dense"):
        trace_outline(model, find_blocks(model), loss_of_output, INPUTS)
