"""A language model of a few thousand parameters in float64, with samples of unequal length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

WORDS = 48
# What depends on the clock, or on the padding of micro-batches.
LEFT_OUT = ("runtime", "_per_second", "total_flos")


def tiny_llama() -> Any:
    set_seed(1)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).double()


def sentences(count: int = 27) -> list[dict[str, list[int]]]:
    """Return samples of different lengths, whose first third is no target."""
    stream = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, 14, (1,), generator=stream))
        words = torch.randint(3, WORDS, (length,), generator=stream).tolist()
        rows.append({"input_ids": words, "labels": [-100] * (length // 3) + words[length // 3 :]})
    return rows


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (width - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], -100) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
    }


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Return arguments with a short last batch, a short last micro-batch, warm-up and clipping."""
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 3,
        "save_strategy": "no",
        "include_num_input_tokens_seen": "non_padding",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**chosen, **changes})


def logged(trainer: Any) -> list[dict[str, float]]:
    """Return the log without times and padding."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(LEFT_OUT)}
        for entry in trainer.state.log_history
    ]
