"""Training whose computing is a timed wait, with any number of parameters: for plans on slow links.

SYNC: exact | auto | PERIOD:CODEC, or ddp: plain DDP on the engine of the run. SAMPLE_S: seconds for each
sample. The main member prints the seconds of a batch, and the samples per second of each member's own work.
Both are of the time after the change to the requested mode.
"""

from __future__ import annotations

import json
import os
import time
from typing import Literal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import barnraise
from barnraise.planning.cost.quality_model import outer_rule
from barnraise.planning.inputs.codecs import LOSSY

PARAMETERS = int(os.environ.get("PARAMETERS", "20000000"))
BATCH = int(os.environ.get("BATCH", "32"))
SAMPLE_S = float(os.environ.get("SAMPLE_S", "0.125"))
BATCHES = int(os.environ.get("BATCHES", "12"))
UNIT = int(os.environ.get("UNIT", str(max(1, BATCH // 4))))

torch.set_num_threads(1)
torch.manual_seed(0)


class Large(torch.nn.Module):
    """Every parameter has a gradient, and a forward pass costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(PARAMETERS // 8) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight[: x.numel()].dot(x.reshape(-1)) for weight in self.weights]).mean()


def wanted(text: str) -> barnraise.Sync | Literal["exact", "auto"]:
    if text == "exact":
        return "exact"
    if text == "auto":
        return "auto"
    period, _, codec = text.partition(":")
    known = next((candidate for candidate in LOSSY if candidate.name == codec), LOSSY[0])
    outer = outer_rule(known, int(period), is_lora=False)
    return barnraise.Sync(period=int(period), codec=codec, rate=outer.learning_rate, momentum=outer.momentum)


def ddp() -> None:
    """Train with plain DDP: every step exact, every machine the same share."""
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Large())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    share = BATCH // dist.get_world_size()
    times = []
    for _ in range(BATCHES):
        time.sleep(SAMPLE_S * share)
        model(torch.randn(share, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.monotonic())
    seconds = (times[-1] - times[0]) / (len(times) - 1)
    if dist.get_rank() == 0:
        print("FIGURES", json.dumps({"step_s": seconds}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    if os.environ.get("SYNC") == "ddp":
        ddp()
        return
    model = Large()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run = barnraise.init(unit=UNIT, checkpoint_s=1e6, sync=wanted(os.environ.get("SYNC", "exact")))
    loader = DataLoader(TensorDataset(torch.randn(BATCH * BATCHES, 4)), batch_size=BATCH)
    model, optimizer, batches = run.prepare(model, optimizer, loader)
    commits: list[tuple[float, int, barnraise.Sync]] = []
    run.on_commit(lambda commit: commits.append((time.monotonic(), commit.done, commit.sync)))
    for batch in batches:
        for (x,) in batch:
            time.sleep(SAMPLE_S * len(x))
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    settled = [commit for commit in commits if commit[2] == commits[-1][2]]
    first, last = settled[0 if len(settled) < 3 else 1], settled[-1]
    seconds = (last[0] - first[0]) / (last[1] - first[1])
    if run.is_main:
        speeds = run._throughput.speeds  # what the session's own plans begin with
        print("FIGURES", json.dumps({"step_s": seconds, "speeds": speeds}), flush=True)


if __name__ == "__main__":
    main()
