"""Llama-shaped model of a benchmark: its sizes, and its base as files that all ways to train read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

SAMPLES = "samples.npy"  # numbers of tokens, one row for each sample, in the order of training
MOST_SAMPLES = 2400
LORA_RANK, LEARNING_RATE = 8, 1e-3


class Size(NamedTuple):
    """Shape of a model, and the amounts of its training and its hosts.

    ``length``: tokens of a sample; a micro-batch is one sample. It is small because two cores compute slowly
    beside a line of 1 Gbit/s. That favours the split over FSDP2, whose traffic does not depend on it.
    ``batch`` and ``kill_batch``: samples of a step, while speed is measured and while hosts are killed.
    ``limits_mb``: memory of the hosts.
    """

    width: int
    inner: int
    layers: int
    heads: int
    groups: int  # heads of keys and values
    words: int
    length: int
    batch: int
    kill_batch: int
    limits_mb: tuple[int, int, int]


SIZES = {
    "tiny": Size(64, 128, 6, 4, 2, 512, 16, 12, 3, (1200, 1100, 1000)),
    "middle": Size(1536, 4096, 18, 24, 4, 32000, 4, 12, 3, (2150, 2100, 2000)),
    "full": Size(2048, 5632, 22, 32, 4, 32000, 4, 12, 3, (3700, 3500, 3300)),  # as TinyLlama 1.1B
}


def config_of(size: Size) -> Any:
    """Return the configuration of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=size.words,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


def write_base(folder: Path, size: Size) -> tuple[int, int]:
    """Write the files of the model with random weights, block by block. Return its parameters and bytes."""
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    from barnraise.training.pipeline.empty_weights import empty_weights

    config = config_of(size)
    with empty_weights():
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    by_file: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, parameter in model.named_parameters():
        file = name.partition("layers.")[2].partition(".")[0] or name
        by_file.setdefault(file, []).append((name, parameter.shape))
    source, count = torch.Generator().manual_seed(0), 0
    for number, members in enumerate(by_file.values()):
        tensors = {}
        for name, shape in members:
            tensors[name] = torch.ones(shape)
            if len(shape) > 1:
                tensors[name].normal_(0.0, 0.02, generator=source)
            count += shape.numel()
        save_file(tensors, folder / f"model-{number:05d}.safetensors")
    ids = torch.randint(0, size.words, (MOST_SAMPLES, size.length), generator=source)
    np.save(folder / SAMPLES, ids.numpy())
    return count, 4 * count


def variables(base: Path, size: Size, *, batch: int, steps: int) -> dict[str, str]:
    """Return the environment variables that all programs read."""
    given = {
        "BASE": base,
        "SAMPLES": base / SAMPLES,
        "BATCH": batch,
        "STEPS": steps,
        "LORA_RANK": LORA_RANK,
        "LEARNING_RATE": LEARNING_RATE,
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in given.items()}
