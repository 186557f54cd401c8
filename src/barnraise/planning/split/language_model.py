"""Sizes of a language model that is split, and its operations, from its public configuration. Pure.

The model is like Llama: each block has attention and a gated layer. It is trained with LoRA on all linear
layers, and with gradient checkpointing. So a block keeps only what it was called with, and its backward pass
computes the block once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from barnraise.core.errors import ConfigError
from barnraise.planning.split.stage_placement import ModelParts, PartSize
from barnraise.planning.split.stage_time import BlockSpeed

NUMBER_BYTES = 2.0  # of bfloat16 and float16
LORA_RANK = 16
_FLOAT = 4.0
_LOGITS = 10  # bytes of a word's score: in bfloat16, in float32, and its gradient
_MOST = 1 << 32
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HINT = "Give the folder of a dense model such as Llama; `barnraise run --dry-run` measures any other one."


class LanguageShape(NamedTuple):
    """Shape of a language model. ``queries`` and ``keys``: columns of their matrices, in all heads."""

    hidden: int
    inner: int
    layers: int
    queries: int
    keys: int
    words: int
    is_tied: bool = False

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Return the sizes of the matrices of a block."""
        return [
            (self.hidden, self.queries),
            (self.hidden, self.keys),
            (self.hidden, self.keys),
            (self.queries, self.hidden),
            (self.hidden, self.inner),
            (self.hidden, self.inner),
            (self.inner, self.hidden),
        ]

    @property
    def block_numbers(self) -> int:
        """Return the numbers of the matrices of a block."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def adapter_numbers(self) -> int:
        """Return the numbers that are trained in a block."""
        return LORA_RANK * sum(rows + columns for rows, columns in self.matrices)

    def parts(self, tokens: int, block_bytes: float = NUMBER_BYTES) -> ModelParts:
        """Return the sizes of the parts.

        ``tokens``: of a micro-batch. ``block_bytes``: of a frozen number.
        """
        boundary = round(tokens * self.hidden * NUMBER_BYTES)
        frozen, trained = round(self.block_numbers * block_bytes), round(self.adapter_numbers * _FLOAT)
        ends = round(self.words * self.hidden * NUMBER_BYTES)
        return ModelParts(
            PartSize(ends),
            (PartSize(frozen, trained, boundary),) * self.layers,
            PartSize(ends, 0, tokens * self.words * _LOGITS),
            boundary,
            ends if self.is_tied else 0,
        )

    def block_flops(self, tokens: int) -> float:
        """Return the operations of the forward pass of a block for a sample of ``tokens`` tokens."""
        return 2.0 * self.block_numbers * tokens + 2.0 * tokens**2 * self.hidden

    def head_flops(self, tokens: int) -> float:
        """Return the operations of the forward pass after the blocks."""
        return 2.0 * self.words * self.hidden * tokens

    def speed(self, tokens: int, samples: int, flops_per_s: float) -> BlockSpeed:
        """Return the seconds of a micro-batch of some samples on a machine."""
        forward_s = samples * self.block_flops(tokens) / flops_per_s
        return BlockSpeed(
            forward_s, 2 * forward_s, after_s=2 * samples * self.head_flops(tokens) / flops_per_s
        )


def read_shape(document: Mapping[str, Any], name: str) -> LanguageShape:
    """Return the shape that a ``config.json`` of Transformers describes; ``name``: of the file, for errors.

    Raise ConfigError if it describes another kind of model.
    """
    config = document.get("text_config", document)
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name} has a text_config that is no table", hint=_HINT)
    if any(config.get(key) for key in _EXPERTS):
        raise ConfigError(f"{name} describes a mixture of experts, which is not counted yet", hint=_HINT)

    def count(key: str, otherwise: int | None = None) -> int:
        value = config.get(key)
        value = otherwise if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            raise ConfigError(f"{name} has no usable {key}", hint=_HINT)
        return value

    hidden, heads = count("hidden_size"), count("num_attention_heads")
    width = count("head_dim", max(1, hidden // heads))
    return LanguageShape(
        hidden,
        count("intermediate_size"),
        count("num_hidden_layers"),
        heads * width,
        count("num_key_value_heads", heads) * width,
        count("vocab_size"),
        bool(config.get("tie_word_embeddings", False)),
    )
