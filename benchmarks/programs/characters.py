"""A small transformer learns the characters of Python's own library; prints its loss on what was held out.

SYNC: exact | auto | PERIOD:CODEC. SEED, BATCHES.
"""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import torch
from planned import wanted  # type: ignore[import-not-found]  # beside this script
from torch.utils.data import DataLoader, Dataset

import barnraise

SEED = int(os.environ.get("SEED", "0"))
BATCHES = int(os.environ.get("BATCHES", "400"))
BATCH, LENGTH, WIDTH = 64, 48, 64
HELD_OUT = 64  # batches

torch.set_num_threads(1)
torch.manual_seed(SEED)


def text() -> torch.Tensor:
    """Return bytes of the standard library, which are the same for the same Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: 2 << 20]
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).clamp(max=127).long()


class Pieces(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, text: torch.Tensor, count: int) -> None:
        stream = torch.Generator().manual_seed(SEED)
        self.text = text
        self.starts = torch.randint(len(text) - LENGTH - 1, (count,), generator=stream).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[self.starts[index] : self.starts[index] + LENGTH + 1]
        return piece[:-1], piece[1:]


class Characters(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Embedding(128, WIDTH)
        self.places = torch.nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.outside = torch.nn.Linear(WIDTH, 128)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.inside(x) + self.places, mask=self.mask, is_causal=True)
        return torch.as_tensor(self.outside(hidden))


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main() -> None:
    whole = text()
    cut = len(whole) * 9 // 10
    model: torch.nn.Module = Characters()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=BATCHES + 1, pct_start=0.1)
    run = barnraise.init(seed=SEED, unit=4, checkpoint_s=1e6, sync=wanted(os.environ.get("SYNC", "exact")))
    loader = DataLoader(Pieces(whole[:cut], BATCH * BATCHES), batch_size=BATCH)
    model, optimizer, batches, scheduler = run.prepare(model, optimizer, loader, scheduler)
    run.clip_grad_norm(1.0)
    for batch in batches:
        for x, y in batch:
            loss = loss_of(model, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            run.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    if run.is_main:
        held_out = DataLoader(Pieces(whole[cut:], BATCH * HELD_OUT), batch_size=BATCH)
        model.eval()
        with torch.no_grad():
            losses = [float(loss_of(model, x, y)) for x, y in held_out]
        curve = [entry["loss"] for entry in run.history if "loss" in entry]
        figures = {"loss": sum(losses) / len(losses), "sync": run.sync.sentence(), "curve": curve}
        print("FIGURES", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
