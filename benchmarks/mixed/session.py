"""A training for machines of different systems. ``variables.json`` beside it says how it goes."""

from __future__ import annotations

import json
import os
import platform
import sys
import time

with open("variables.json", encoding="utf-8") as file:
    GIVEN = json.load(file)
# Wine shows the files of this computer as drive Z.
ROOT = "Z:" if sys.platform == "win32" else ""
# A file for each system: on Windows, two programs that append to one file overwrite each other.
os.environ["BARNRAISE_TRACE_COMMITS"] = f"{ROOT}{GIVEN['trace']}.{sys.platform}-{platform.machine()}"

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import barnraise  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(0)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    if GIVEN["optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    # Not by random numbers: these differ between builds of torch.
    x = torch.sin(torch.arange(240 * 16, dtype=torch.float64)).reshape(240, 16).float()
    y = (x[:, 0] > x[:, 1]).long()
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
    run = barnraise.init(seed=5, checkpoint_s=GIVEN["checkpoint_s"], copies=3)
    model, optimizer, batches = run.prepare(model, make_optimizer(model), loader)
    for _ in run.epochs(GIVEN["epochs"]):
        for batch in batches:
            for inputs, labels in batch:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                if os.path.exists(ROOT + GIVEN["hold"]):
                    time.sleep(GIVEN["held_s"])
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
    total = sum(value.double().abs().sum().item() for value in model.state_dict().values())
    print(f"FINAL step {run.step} of {run.total_steps} loss {run.history[-1]['loss']:.6f} sum {total:.6f}")


if __name__ == "__main__":
    main()
