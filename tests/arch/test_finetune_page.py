"""Table of docs/finetune.md: computed from the models' shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.repository import ROOT

transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")

pytestmark = pytest.mark.slow

RATES = (20e6, 200e6, 1e9, 10e9)  # bits per second
# Shapes of Llama 3.2 and 3.1.
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "tie_word_embeddings": False,
    },
}


def parameters(shape: dict[str, Any]) -> tuple[int, int]:
    """Return the number of parameters of the base, and of its adapter."""
    heads = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**heads, **shape))
        base = sum(parameter.numel() for parameter in model.parameters())
        tuned = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    return base, sum(parameter.numel() for parameter in tuned.parameters() if parameter.requires_grad)


def size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 90:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def rows() -> list[str]:
    lines = []
    for name, shape in SHAPES.items():
        base, adapter = parameters(shape)
        parts = (
            ("base model", "once to each machine", 2 * base),
            ("gradient of the adapter", "each step", 4 * adapter),
            ("state of the adapter", "when a machine joins", 3 * 4 * adapter),
        )
        for what, when, count in parts:
            times = " | ".join(duration(8 * count / rate) for rate in RATES)
            lines.append(f"| {name} | {what} | {when} | {size(count)} | {times} |")
    return lines


def test_table_of_the_page_is_computed_from_the_sizes() -> None:
    page = (ROOT / "docs" / "finetune.md").read_text("utf-8")
    assert "\n".join(rows()) in page
