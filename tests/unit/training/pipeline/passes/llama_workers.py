"""Two real processes that train a small Llama with LoRA; test_activations.py runs them and reads results.

Each process trains the same model several times, with other forms of activations or another seed.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch.utils.data import DataLoader, Dataset

from barnraise.core import metrics
from barnraise.training.pipeline import split_loop
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.forked import fork_all
from tests.unit.training.mapping.map_workers import FileGroupManager
from tests.unit.training.pipeline.split_workers import place_by_memory

HIDDEN, LENGTH, WORDS, BATCH, EPOCHS = 64, 16, 32, 16, 10
TRAININGS = {  # the form of activations, the seed of the adapter, and the type of the model
    "exact": ("exact", 0, "float32"),
    "bf16": ("bf16", 0, "float32"),
    "int8": ("int8", 0, "float32"),
    "seed": ("exact", 1, "float32"),
    "half": ("exact", 0, "bfloat16"),
    "half-int8": ("int8", 0, "bfloat16"),
    "half-seed": ("exact", 1, "bfloat16"),
}
_SENT = "barnraise_activation_sent_bytes_total"


class Multiples(Dataset[dict[str, torch.Tensor]]):
    """Sequences in which each word is the word before plus a constant of the sequence."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) * (1 + index % 7) + index) % WORDS
        return {"input_ids": ids, "labels": ids.clone()}


def config() -> Any:
    return transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=WORDS,
        bos_token_id=1,
        eos_token_id=2,
    )


def write_base(folder: Path) -> None:
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(folder)


def train(room: Path, machine: str, name: str) -> None:
    activations, seed, dtype = TRAININGS[name]
    (room / name).mkdir(exist_ok=True)
    manager = FileGroupManager(machine, room / name, ["ab"])
    run = Session(manager, seed=seed, unit=4, checkpoints=CheckpointManager(None, 60.0, 1))
    with run.empty():
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=getattr(torch, dtype))
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    before = sent_bytes()
    split, batches = run.split(
        model,
        DataLoader(Multiples(), batch_size=BATCH),
        weights=room / "base",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        activations=activations,  # type: ignore[arg-type]
    )
    losses = [split.train_step(batch) for _ in run.epochs(EPOCHS) for batch in batches]
    (room / f"{name}-{machine}.json").write_text(json.dumps([losses, sent_bytes() - before]))
    manager.group.close()


def sent_bytes() -> float:
    return sum(sample.value for sample in metrics.registry.samples() if sample.name == _SENT)


def member(machine: str, room: Path) -> None:
    torch.set_num_threads(1)
    split_loop.place_pipelines = partial(
        place_by_memory, 0.0
    )  # both have a stage, however fast the links are
    for name in TRAININGS:
        train(room, machine, name)


def main() -> int:
    room = Path(sys.argv[1])
    write_base(room / "base")
    return fork_all(partial(member, machine, room) for machine in "ab")


if __name__ == "__main__":
    sys.exit(main())
