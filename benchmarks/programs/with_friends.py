"""Character transformer with friends at a hub, or alone, until all together have trained STOP batches.

BATCHES: length of the learning rate's one cycle. SAMPLE_S: seconds that a sample takes on the simulated
device. UNIT: samples computed at once. SEED. Prints the loss on held-out data, and the seconds between
computing one unit and the next: some of them are exchanges with the hub.
"""

from __future__ import annotations

import json
import math
import os
import time

import torch
from characters import (  # type: ignore[import-not-found]  # beside this script
    BATCH,
    BATCHES,
    HELD_OUT,
    SEED,
    Characters,
    Pieces,
    loss_of,
    text,
)
from torch.utils.data import DataLoader

import barnraise

STOP = int(os.environ.get("STOP", BATCHES))
SAMPLE_S = float(os.environ.get("SAMPLE_S", "0"))
RATE, WARM_UP = 3e-3, 0.1


def part_of_rate(step: int) -> float:
    """Return the factor of the learning rate: up within the first tenth, then down to zero, and zero after
    that.
    """
    share: float = min(1.0, step / BATCHES)
    if share < WARM_UP:
        return 0.04 + 0.96 * share / WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP))


def main() -> None:
    whole = text()
    cut = len(whole) * 9 // 10
    model: torch.nn.Module = Characters()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, part_of_rate)
    run = barnraise.init(seed=SEED, unit=int(os.environ.get("UNIT", "16")), checkpoint_s=1e6)
    loader = DataLoader(Pieces(whole[:cut], 2 * BATCH * BATCHES), batch_size=BATCH)  # more than are trained
    model, optimizer, batches, scheduler = run.prepare(model, optimizer, loader, scheduler)
    run.clip_grad_norm(1.0)
    pauses, ended = [], time.monotonic()
    for batch in batches:
        for x, y in batch:
            began = time.monotonic()
            pauses.append(round(began - ended, 4))
            loss = loss_of(model, x, y)
            loss.backward()
            time.sleep(max(0.0, SAMPLE_S * len(x) - (time.monotonic() - began)))
            run.log(loss=loss)
            ended = time.monotonic()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if run.done >= STOP:
            break
    held_out = DataLoader(Pieces(whole[cut:], BATCH * HELD_OUT), batch_size=BATCH)
    model.eval()
    with torch.no_grad():
        losses = [float(loss_of(model, x, y)) for x, y in held_out]
    figures = {"loss": sum(losses) / len(losses), "done": run.done, "pauses": pauses}
    print("FIGURES", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
