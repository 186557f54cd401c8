"""Training in a session that logs its loss, timed: PATH gets the seconds of each step of rank 0 as JSON.

With RECORD=off the worker writes no record, so that the cost of the record can be seen too.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import barnraise

WIDTH = 512
STEPS = int(os.environ["STEPS"])
BATCH = 64

if os.environ["RECORD"] == "off":
    from barnraise.training.record.recorder import RunRecorder

    RunRecorder.__call__ = lambda self: None  # type: ignore[method-assign]

torch.set_num_threads(1)
torch.manual_seed(0)


def main() -> None:
    """Train for the given number of steps, and write their times."""
    model: Any = torch.nn.Sequential(
        *[layer for _ in range(6) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(STEPS * BATCH, WIDTH)
    run = barnraise.init(unit=16, checkpoint_s=3600)
    loader = DataLoader(TensorDataset(x), batch_size=BATCH, shuffle=True)
    model, optimizer, batches = run.prepare(model, optimizer, loader)
    times = [time.monotonic()]
    run.on_commit(lambda _: times.append(time.monotonic()))
    for batch in batches:
        for (rows,) in batch:
            for _ in range(int(os.environ["REPEATS"])):  # compute that needs no communication
                loss = torch.nn.functional.mse_loss(model(rows), rows)
            loss.backward()  # type: ignore[no-untyped-call]
            run.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    if run.is_main:
        seconds = [after - before for before, after in itertools.pairwise(times)]
        Path(os.environ["INTO"]).write_text(json.dumps(seconds))


main()
