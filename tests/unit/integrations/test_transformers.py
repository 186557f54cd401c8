"""Names that a script imports: Trainer and TRL's SFTTrainer, each in a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.threaded_group import LoneWorker

transformers = pytest.importorskip("transformers", reason="needs transformers")
trl = pytest.importorskip("trl", reason="needs trl")
peft = pytest.importorskip("peft", reason="needs peft")

import datasets  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from barnraise.integrations import transformers as integration  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
WORDS = ["<pad>", "<eos>", "what", "is", "it", "one", "two", "three", "and", "?"]


def questions() -> Any:
    """Return pairs of different lengths, in a data set of Hugging Face."""
    rows = []
    for number in range(21):
        words = [WORDS[5 + (number * place) % 3] for place in range(1, 2 + number % 4)]
        rows.append({"prompt": f"what is {' and '.join(words)} ?", "completion": f" it is {words[0]}"})
    return datasets.Dataset.from_list(rows)


def word_tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="?"
    )


def small_config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
    )


def tune(kind: Any, folder: Path, **more: Any) -> Any:
    """Train with TRL, one micro-batch of four samples in a step, and return the trainer."""
    transformers.set_seed(0)
    trainer = kind(
        model=transformers.LlamaForCausalLM(small_config()).double(),
        args=trl.SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        train_dataset=questions(),
        processing_class=word_tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        **more,
    )
    trainer.train()
    return trainer


def test_sft_trainer_in_a_session_equals_the_plain_one(tmp_path: Path) -> None:
    plain = tune(trl.SFTTrainer, tmp_path / "plain")
    run = Session(LoneWorker(), seed=1, unit=1, checkpoints=CheckpointManager(None, 60.0, 1))
    shared = tune(integration.SFTTrainer, tmp_path / "shared", session=run)
    steps = [entry for entry in shared.state.log_history if "loss" in entry]
    assert len(steps) == 6
    names = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens", "step")
    for expected, entry in zip(plain.state.log_history, steps, strict=False):
        assert {name: entry[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-5, abs=1e-7
        )
    shared.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def prefer(kind: Any, folder: Path, **more: Any) -> Any:
    """Train with preferences, which has ten metrics, and return the trainer."""
    transformers.set_seed(0)
    rows = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " it is what"}
        for row in questions().select(range(8))
    ]
    trainer = kind(
        model=transformers.LlamaForCausalLM(small_config()).double(),
        args=trl.DPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=word_tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        **more,
    )
    trainer.train()
    return trainer


def test_dpo_trainer_in_a_session_logs_all_of_its_metrics(tmp_path: Path) -> None:
    plain = prefer(trl.DPOTrainer, tmp_path / "plain")
    run = Session(LoneWorker(), seed=1, unit=4, checkpoints=CheckpointManager(None, 60.0, 1))
    shared = prefer(integration.in_session(trl.DPOTrainer), tmp_path / "shared", session=run)
    for expected, entry in zip(plain.state.log_history[:2], shared.state.log_history[:2], strict=True):
        assert entry.keys() == expected.keys()
        assert entry == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_names_are_classes_of_their_libraries() -> None:
    assert issubclass(integration.Trainer, transformers.Trainer)
    assert issubclass(integration.SFTTrainer, trl.SFTTrainer)
    assert integration.Trainer is integration.Trainer
    with pytest.raises(AttributeError):
        _ = integration.DPOTrainer
