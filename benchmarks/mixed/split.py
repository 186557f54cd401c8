"""A split model for machines of different systems. ``variables.json`` beside it says how it goes.

Each machine writes a line for each step: its number, the loss, the blocks of this machine, and how many
machines train. A process alone also writes the base, if there is none yet.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

import barnraise

with open("variables.json", encoding="utf-8") as file:
    GIVEN = json.load(file)
# Wine shows the files of this computer as drive Z.
ROOT = "Z:" if sys.platform == "win32" else ""
BASE = Path(f"{ROOT}{GIVEN['base']}")
RESULTS = f"{ROOT}{GIVEN['results']}.{sys.platform}-{platform.machine()}"
WIDTH, BLOCKS, SAMPLES, BATCH = 32, 9, 240, 24

torch.set_num_threads(1)


class Output(NamedTuple):
    loss: torch.Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.outer(torch.tanh(self.inner(self.norm(hidden))))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return Output(nn.functional.cross_entropy(self.last(hidden), y))


def waves(count: int, pace: float = 1.0) -> torch.Tensor:
    """Return values that all machines agree on: random numbers differ between builds of torch."""
    return torch.sin(pace * torch.arange(count, dtype=torch.float64)).float()


def write_base() -> None:
    values = {
        name: 0.3 * waves(value.numel(), 0.7 + 0.01 * number).reshape(value.shape)
        for number, (name, value) in enumerate(Model().named_parameters())
    }
    BASE.mkdir()
    save_file(values, BASE / "model.safetensors")


def rows() -> list[dict[str, torch.Tensor]]:
    x = waves(SAMPLES * 16).reshape(SAMPLES, 16)
    return [{"x": row, "y": (row[0] > row[1]).long()} for row in x]


def main() -> None:
    if not BASE.exists():
        write_base()
    run = barnraise.init(seed=5, unit=3)
    with run.empty():
        model = Model()
    split, batches = run.split(
        model,
        DataLoader(rows(), batch_size=BATCH, shuffle=True),  # type: ignore[arg-type]
        weights=BASE,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        weight=lambda batch: len(batch["y"]),
    )
    for _ in run.epochs(GIVEN["epochs"]):
        for batch in batches:
            loss = split.train_step(batch)
            with open(RESULTS, "a", encoding="ascii") as results:
                blocks = split.loop.runs[run._manager.rank]
                results.write(json.dumps([run.step, loss, blocks, run.world]) + "\n")
            if os.path.exists(ROOT + GIVEN["hold"]):
                time.sleep(GIVEN["held_s"])
    print(f"FINAL step {run.step} of {run.total_steps} loss {loss:.6f}")


if __name__ == "__main__":
    main()
