"""A small model with a list of blocks, its weights in files, and its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, WORDS, BLOCKS, SAMPLES = 12, 17, 5, 24


class Output(NamedTuple):
    loss: torch.Tensor


class Block(nn.Module):
    """A residual block with a frozen and a trained layer, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH)
        self.low = nn.Linear(WIDTH, 2, bias=False)
        self.high = nn.Linear(2, WIDTH, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inside = self.norm(hidden)
        return hidden + mask * torch.tanh(self.base(inside) + self.high(self.low(self.drop(inside))))


class BlockModel(nn.Module):
    """Embedding, blocks and head; only the narrow layers of the blocks are trained."""

    layers: Any  # blocks, by number
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("low" in name or "high" in name)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = self.embed(ids) * self.scale
        mask = (ids > 0).unsqueeze(-1).to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        logits = self.head(hidden)[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return Output(loss)


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sentences of different lengths."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        source = torch.Generator().manual_seed(index)
        return {"ids": torch.randint(1, WORDS, (3 + index % 4,), generator=source)}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True)
    return {"ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def loader(batch: int = 8) -> DataLoader[Any]:
    return DataLoader(Sentences(), batch_size=batch, shuffle=True, collate_fn=collate)


def train_only(model: BlockModel, blocks: Sequence[int] | None) -> BlockModel:
    """Freeze all blocks but these; None: train the whole model."""
    if blocks is None:
        return model.requires_grad_(True)
    for number, block in enumerate(model.layers):
        if number not in blocks:
            block.requires_grad_(False)
    return model


def write_base(folder: Path, trained: Sequence[int] | None = range(BLOCKS)) -> BlockModel:
    """Write the frozen weights in two files, or all weights if nothing is frozen. Return the whole model."""
    torch.manual_seed(5)
    model = train_only(BlockModel(), trained)
    frozen = {
        name: value.detach()
        for name, value in model.named_parameters()
        if not value.requires_grad or trained is None
    }
    names = sorted(frozen)
    folder.mkdir(parents=True)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: frozen[name] for name in part}, folder / f"model-{number}.safetensors")
    return model
