"""One training loop, timed: with a session, with DDP under any backend, or alone.

WAY: session | ddp. DELAY: seconds for each sample, which simulate a slower device. A machine may multiply
DELAY by SLOWNESS in its own environment, from step SLOWS_AT on, as if a game had been started there. Rank 0
prints the median seconds of a step, and all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = int(os.environ.get("WIDTH", "1448"))
LAYERS = int(os.environ.get("LAYERS", "4"))
BATCH = int(os.environ.get("BATCH", "16"))
UNIT = int(os.environ.get("UNIT", "4"))
STEPS = int(os.environ.get("STEPS", "20"))
DELAY = float(os.environ.get("DELAY", "0"))
SLOWNESS = float(os.environ.get("SLOWNESS", "1"))
SLOWS_AT = int(os.environ.get("SLOWS_AT", "0"))
WARM = int(os.environ.get("WARM", "4"))

torch.set_num_threads(1)
torch.manual_seed(0)


def make_model() -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))


def compute(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    time.sleep(DELAY * (SLOWNESS if step >= SLOWS_AT else 1.0) * len(x))
    torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]


def train_with_session(data: TensorDataset) -> tuple[bool, list[float]]:
    import barnraise

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = barnraise.init(unit=UNIT, checkpoint_s=3600)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, batches = run.prepare(model, optimizer, loader)
    times = [time.monotonic()]
    run.on_commit(lambda _: times.append(time.monotonic()))
    for batch in batches:
        for x, y in batch:
            compute(model, x, y, len(times) - 1)
            optimizer.step()
            optimizer.zero_grad()
    return run.is_main, times


def train_with_ddp(data: TensorDataset) -> tuple[bool, list[float]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank)
    times = [time.monotonic()]
    for x, y in DataLoader(data, batch_size=BATCH // world, sampler=sampler):
        compute(model, x, y, len(times) - 1)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.monotonic())
    dist.destroy_process_group()
    return rank == 0, times


def main() -> None:
    data = TensorDataset(torch.randn(BATCH * STEPS, WIDTH), torch.randn(BATCH * STEPS, 1))
    way = train_with_session if os.environ.get("WAY", "session") == "session" else train_with_ddp
    speaks, times = way(data)
    steps = [late - early for early, late in itertools.pairwise(times)][WARM:]
    if speaks:
        print("FIGURES", json.dumps({"median": statistics.median(steps), "steps": steps}), flush=True)


if __name__ == "__main__":
    main()
