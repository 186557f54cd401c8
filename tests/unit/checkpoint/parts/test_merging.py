"""An adapter that is merged layer by layer, against peft's merge of the whole model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from barnraise.checkpoint.adapter_files import AdapterDescription, write_merged
from barnraise.checkpoint.parts import merge_by_layers
from barnraise.training.state.adapter import describe_adapter

peft = pytest.importorskip("peft", reason="needs peft")
transformers = pytest.importorskip("transformers", reason="needs transformers")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return the folder of a small model in two files."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base", max_shard_size="8KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    return tmp_path / "base"


def trained(
    base: Path, unfrozen: str = "", **options: Any
) -> tuple[AdapterDescription, dict[str, torch.Tensor]]:
    """Return an adapter whose numbers are as after a training."""
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=3, **options))
    values = {}
    for name, parameter in model.named_parameters():
        if unfrozen and unfrozen in name:
            parameter.requires_grad_(True)
        if parameter.requires_grad:
            values[name] = parameter.detach() + 0.1 * torch.randn_like(parameter)
    description = describe_adapter(model)
    assert description is not None
    return description, values


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["v_proj", "embed_tokens"], "use_rslora": True},
        {"target_modules": ["down_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "unfrozen": "input_layernorm"},
    ],
)
def test_merge_equals_that_of_the_whole_model(base: Path, tmp_path: Path, options: Any) -> None:
    description, values = trained(base, **options)
    assert merge_by_layers(tmp_path / "merged", description, values, base, {"steps": "3"})
    write_merged(tmp_path / "whole", description, values, base, {}, {})
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    before = transformers.LlamaForCausalLM.from_pretrained(base).state_dict()
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(merged[name], value)
    assert any(not torch.equal(merged[name], before[name]) for name in merged)
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in merged.items())


def test_base_with_other_names_is_left_to_the_merge_of_the_whole_model(base: Path, tmp_path: Path) -> None:
    description, values = trained(base, target_modules=["q_proj"])
    for path in base.glob("model*.safetensors"):
        os.rename(path, path.with_name(f"other-{path.name}"))
    assert not merge_by_layers(tmp_path / "merged", description, values, base, {})
    assert not (tmp_path / "merged").exists()
