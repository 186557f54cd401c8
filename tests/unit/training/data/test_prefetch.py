"""Loader processes that persist over steps and epochs."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import barnraise
from barnraise.training.data.prefetch import PersistentLoader

SAMPLES, BATCH, EPOCHS = 48, 12, 2


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Dataset with random numbers in each sample."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.pause_s)
        x = torch.tensor([index / SAMPLES, 1.0], dtype=torch.float64)
        return x + 0.1 * torch.rand(2, dtype=torch.float64), x.sum().reshape(1)


class Places(Dataset[tuple[int, int]]):
    def __getitem__(self, place: Any) -> tuple[int, int]:
        return place[0], place[1]


def note_start(folder: Path, worker: int) -> None:
    (folder / f"{worker}-{os.getpid()}").touch()


def train(loader: DataLoader[Any]) -> tuple[torch.Tensor, float, Any]:
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1, dtype=torch.float64)
    run = barnraise.init(seed=9, unit=3)
    net, optimizer, batches = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    for _ in run.epochs(EPOCHS):
        for batch in batches:
            for x, y in batch:
                torch.nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    return net.weight.detach(), float(torch.rand(1)), run


@pytest.mark.parametrize("stay", [True, False])
def test_loader_processes_start_once_and_read_same_data(tmp_path: Path, stay: bool) -> None:
    alone, drawn, _ = train(DataLoader(Noisy(), batch_size=BATCH, shuffle=True))
    loader = DataLoader(
        Noisy(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=stay,
        timeout=60.0,
        worker_init_fn=partial(note_start, tmp_path),
    )
    trained, also_drawn, run = train(loader)
    assert torch.equal(trained, alone)
    assert drawn == also_drawn, "the script's own randomness is left alone"
    assert len(list(tmp_path.iterdir())) == (2 if stay else 2 * EPOCHS)
    made = run._data._prefetcher._loader
    assert (made.prefetch_factor, made.timeout) == (3, 60.0)


def test_unused_prefetched_batches_are_dropped() -> None:
    feeding = PersistentLoader(DataLoader(Places(), batch_size=2, num_workers=2), Places())  # type: ignore[arg-type]
    given_up = feeding.batches(0, [[(row, 0), (row, 1)] for row in range(8)])
    assert next(given_up)[0].tolist() == [0, 0]
    rows = [[(row, 5), (row, 6)] for row in (7, 3, 40)]
    batches = [(first.tolist(), second.tolist()) for first, second in feeding.batches(0, rows)]
    assert batches == [([row, row], [5, 6]) for row in (7, 3, 40)]
    assert list(feeding.batches(0, [])) == []


def test_throughput_includes_data_loading() -> None:
    pause_s = 0.01
    _, _, run = train(DataLoader(Noisy(pause_s), batch_size=BATCH))
    assert 0 < run._throughput.speed() <= 1 / pause_s
