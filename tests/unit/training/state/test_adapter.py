"""Adapters of PEFT: saved by a session and exported from its checkpoints, and loaded by peft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from barnraise.checkpoint.adapter_files import read_description, write_adapter, write_merged
from barnraise.checkpoint.serialization import unflatten
from barnraise.core.errors import RunError
from barnraise.training.session import Session
from barnraise.training.state.adapter import describe_adapter
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.threaded_group import LoneWorker

peft = pytest.importorskip("peft", reason="needs peft")
transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.slow


def base_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def train(
    is_trained: Callable[[str], bool] = lambda name: True, unfrozen: str = "nothing"
) -> tuple[Session, Any]:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(base_model(), config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((parameter.requires_grad and is_trained(name)) or unfrozen in name)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
    )
    run = Session(LoneWorker(), seed=1, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))
    loader = DataLoader(TensorDataset(torch.arange(64).reshape(8, 8) % 32), batch_size=4)
    model, optimizer, batches = run.prepare(model, optimizer, loader)
    for _ in run.epochs(2):
        for batch in batches:
            for (words,) in batch:
                model(input_ids=words, labels=words).loss.backward()
                optimizer.step()
    return run, model


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(8)[None]).logits


def test_adapter_that_a_session_saved_is_loaded_by_peft(tmp_path: Path) -> None:
    run, model = train()
    run.save(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "adapter")
    torch.testing.assert_close(outputs(loaded), outputs(model))
    assert not torch.allclose(outputs(loaded), outputs(base_model()))


def test_peft_model_is_saved_into_a_file_without_its_base_unless_complete(tmp_path: Path) -> None:
    run, model = train()
    run.save(tmp_path / "trained.safetensors")
    run.save(tmp_path / "whole.safetensors", complete=True)
    trained, whole = load_file(tmp_path / "trained.safetensors"), load_file(tmp_path / "whole.safetensors")
    assert whole.keys() == model.state_dict().keys()
    expected = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained.keys() == expected


def test_checkpoint_has_the_adapter_and_hashes_of_the_base(tmp_path: Path) -> None:
    run, model = train()
    parts = run._state.flatten(run.done, is_checkpoint=True)
    state = unflatten(parts.skeleton, parts.tensors)
    assert state["model"].keys() >= read_description(state).names.keys()
    assert state["model"].keys() | state["base"]["hashes"].keys() == model.state_dict().keys()
    assert state["base"]["hashes"]


def test_adapter_tensors_that_nothing_trains_are_in_a_checkpoint(tmp_path: Path) -> None:
    run, _ = train(lambda name: "lora_B" in name)
    parts = run._state.flatten(run.done, is_checkpoint=True)
    state = unflatten(parts.skeleton, parts.tensors)
    write_adapter(tmp_path / "adapter", read_description(state), state["model"], {})
    assert any("lora_A" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


def test_adapter_and_merged_model_are_written_from_a_checkpoint(tmp_path: Path) -> None:
    run, model = train()
    parts = run._state.flatten(run.done, is_checkpoint=True)
    state = unflatten(parts.skeleton, parts.tensors)
    description = read_description(state)
    write_adapter(tmp_path / "adapter", description, state["model"], {})
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "adapter")
    torch.testing.assert_close(outputs(loaded), outputs(model))
    base_model().save_pretrained(tmp_path / "base")
    write_merged(
        tmp_path / "merged", description, state["model"], tmp_path / "base", {}, state["base"]["hashes"]
    )
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(outputs(merged), outputs(model), rtol=1e-4, atol=1e-5)


def test_merged_model_has_what_was_trained_beside_the_adapter(tmp_path: Path) -> None:
    run, model = train(unfrozen="input_layernorm")
    parts = run._state.flatten(run.done, is_checkpoint=True)
    state = unflatten(parts.skeleton, parts.tensors)
    base_model().save_pretrained(tmp_path / "base")
    hashes = state["base"]["hashes"]
    write_merged(tmp_path / "merged", read_description(state), state["model"], tmp_path / "base", {}, hashes)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(outputs(merged), outputs(model), rtol=1e-4, atol=1e-5)


def test_merging_with_another_base_is_refused(tmp_path: Path) -> None:
    run, _ = train()
    parts = run._state.flatten(run.done, is_checkpoint=True)
    state = unflatten(parts.skeleton, parts.tensors)
    other = base_model()
    with torch.no_grad():
        other.model.norm.weight += 1
    other.save_pretrained(tmp_path / "base")
    with pytest.raises(RunError, match=r"norm\.weight differs"):
        write_merged(
            tmp_path / "merged",
            read_description(state),
            state["model"],
            tmp_path / "base",
            {},
            state["base"]["hashes"],
        )
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("is_in_adapter", [True, False])
def test_merging_with_a_class_that_lacks_a_trained_head_is_refused(
    tmp_path: Path, *, is_in_adapter: bool
) -> None:
    """The base is a language model, and a classifier was trained on it."""
    base_model().save_pretrained(tmp_path / "base")
    model = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    kind = "SEQ_CLS" if is_in_adapter else None
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=kind))
    if not is_in_adapter:
        model.base_model.model.score.weight.requires_grad_(True)
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    description = describe_adapter(model)
    assert description is not None
    with pytest.raises(RunError, match=r"score.* was trained, but LlamaForCausalLM") as caught:
        write_merged(tmp_path / "merged", description, trained, tmp_path / "base", {}, {})
    assert "--adapter" in (caught.value.hint or "")
    assert not (tmp_path / "merged").exists()


def test_merging_without_a_base_model_names_the_option(tmp_path: Path) -> None:
    _, model = train()
    description = describe_adapter(model)
    assert description is not None
    with pytest.raises(RunError) as caught:
        write_merged(tmp_path / "merged", description, {}, None, {}, {})
    assert "--base" in (caught.value.hint or "")


def test_other_models_have_no_adapter() -> None:
    assert describe_adapter(torch.nn.Linear(2, 2)) is None
    with pytest.raises(RunError, match="without a PEFT adapter"):
        read_description({"model": {}})
