"""Shape of a language model from its configuration, and its sizes."""

from __future__ import annotations

from typing import Any

import pytest

from barnraise.core.errors import ConfigError
from barnraise.planning.split.language_model import LORA_RANK, LanguageShape, read_shape

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
SHAPE = LanguageShape(4096, 14336, 32, 4096, 1024, 128256)


def test_shape_of_a_llama_has_its_known_size() -> None:
    shape = read_shape(LLAMA, "config.json")
    assert shape == SHAPE
    parts = shape.parts(1024)
    assert sum(part.frozen_bytes for part in (parts.before, *parts.blocks, parts.after)) / 2 == pytest.approx(
        8.03e9, rel=0.002
    )
    assert parts.boundary_bytes == 1024 * 4096 * 2
    assert parts.blocks[0].trained_bytes == 4 * shape.adapter_numbers
    assert shape.adapter_numbers == LORA_RANK * sum(rows + columns for rows, columns in shape.matrices)


def test_narrow_base_takes_less_memory_and_tied_ends_count_once() -> None:
    tied = read_shape({**LLAMA, "tie_word_embeddings": True}, "config.json")
    parts = tied.parts(1024, 1.0)
    assert 2 * parts.blocks[0].frozen_bytes == SHAPE.parts(1024).blocks[0].frozen_bytes
    assert parts.tied_bytes == parts.before.frozen_bytes


def test_missing_keys_follow_from_the_others() -> None:
    plain = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read_shape(plain, "x").keys == 4096
    assert read_shape({**LLAMA, "head_dim": 256}, "x")[3:5] == (32 * 256, 8 * 256)
    assert read_shape({"text_config": LLAMA, "vision_config": {}}, "x") == SHAPE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "has no usable hidden_size"),
        ({"vocab_size": "many"}, "has no usable vocab_size"),
        ({"num_hidden_layers": 0}, "has no usable num_hidden_layers"),
        ({"num_hidden_layers": True}, "has no usable num_hidden_layers"),
        ({"num_attention_heads": 1 << 40}, "has no usable num_attention_heads"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"text_config": []}, "no table"),
    ],
)
def test_other_models_are_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_shape({**LLAMA, **changes}, "config.json")


def test_backward_pass_computes_a_block_once_more() -> None:
    speed = SHAPE.speed(1024, 2, 1e12)
    assert speed.backward_s == 2 * speed.forward_s
    assert speed.forward_s == pytest.approx(2 * SHAPE.block_flops(1024) / 1e12)
    assert speed.after_s == pytest.approx(4 * SHAPE.head_flops(1024) / 1e12)
