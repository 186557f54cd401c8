"""A training for the session's tests: small, in float64, with what makes exactness hard."""

from __future__ import annotations

import json
import logging
import os
import time

if os.path.exists("variables.json"):  # unlike values of --set, they survive the end of all agents
    with open("variables.json", encoding="utf-8") as file:
        os.environ.update(json.load(file))
if os.environ.get("MIXED") and int(os.environ.get("RANK", "0")) % 2:
    os.environ["ATEN_CPU_CAPABILITY"] = "default"  # stands for an older processor

import torch
from torch.utils.data import DataLoader, TensorDataset

import barnraise

torch.set_num_threads(1)
torch.manual_seed(0)
logging.basicConfig(level=os.environ.get("BARNRAISE_LOG", "warning").upper())
KIND = torch.float32 if os.environ.get("KIND") == "float32" else torch.float64


class Images(torch.nn.Module):
    """Convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3, bias=False, dtype=KIND),
            torch.nn.BatchNorm2d(4, dtype=KIND),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(4 * 36, 3, dtype=KIND),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(-1, 1, 8, 8))


class Words(torch.nn.Module):
    """A small transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(8, 16, dtype=KIND)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, dtype=KIND)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.outside = torch.nn.Linear(16, 3, dtype=KIND)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(self.layers(self.inside(x.view(-1, 8, 8))).mean(1))


def main() -> None:
    x = torch.randn(int(os.environ.get("SAMPLES", "240")), 64, dtype=torch.float64).to(KIND)
    y = (x[:, :3].abs() + x[:, 3:6]).argmax(1)
    model: torch.nn.Module = Images() if os.environ.get("MODEL", "images") == "images" else Words()
    if os.environ.get("OPTIMIZER", "adamw") == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
    every, copies = float(os.environ.get("CHECKPOINT_S", "60")), int(os.environ.get("COPIES", "2"))
    period, codec = int(os.environ.get("PERIOD", "1")), os.environ.get("CODEC", "exact")
    sync = (
        barnraise.Sync(period=period, codec=codec, momentum=0.3) if period > 1 or codec != "exact" else None
    )
    run = barnraise.init(seed=5, checkpoint_s=every, copies=copies, sync=sync)
    model, optimizer, batches, scheduler = run.prepare(model, optimizer, loader, scheduler)
    delay = float(os.environ.get("DELAY", "0"))
    hold = os.environ.get("HOLD", "")  # as long as this file is there, nothing comes to its end soon
    held_s = float(os.environ.get("HOLD_S", "0.2"))
    for _ in run.epochs(int(os.environ.get("EPOCHS", "20"))):
        for batch in batches:
            for inputs, labels in batch:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                time.sleep(held_s if hold and os.path.exists(hold) else delay)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.log(loss=loss)
    for name, value in model.state_dict().items():
        print("final", run.done, name, value.double().sum().item(), value.double().square().sum().item())
    if os.environ.get("FINAL"):
        run.save(os.environ["FINAL"])
    print("losses", *(entry["loss"] for entry in run.history[-5:] if "loss" in entry))


if __name__ == "__main__":
    main()
