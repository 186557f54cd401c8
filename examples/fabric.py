"""The training of train.py as a script for Lightning Fabric.

What begins with `strategy` belongs to Barnraise.
"""

import argparse

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from barnraise.integrations.fabric import BarnraiseStrategy


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--small", action="store_true")
    small = options.parse_args().small

    strategy = BarnraiseStrategy()
    fabric = Fabric(strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    points = torch.randn(2048 if small else 32768, 2)  # on which arm of a spiral does each of them lie?
    arms = (torch.sin(torch.atan2(points[:, 1], points[:, 0]) + 3 * points.norm(dim=1)) > 0).long()
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(TensorDataset(points, arms), batch_size=512, shuffle=True)
    loader = fabric.setup_dataloaders(loader)  # 512 samples on all machines together

    for epoch in strategy.epochs(8 if small else 16):
        for x, y in loader:  # this machine's micro-batches
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()  # takes effect on all machines at once, when the step is complete
            optimizer.zero_grad()
            strategy.run.log(loss=loss)
        if strategy.run.history:
            loss = strategy.run.history[-1]["loss"]
            fabric.print(f"epoch {epoch}  loss {loss:.3f}  machines {fabric.world_size}")
    with torch.no_grad():
        x, y = fabric.to_device((points, arms))
        fabric.print(f"final loss {float(nn.functional.cross_entropy(model(x), y)):.5f}")
    fabric.save("spiral.ckpt", {"model": model})


if __name__ == "__main__":
    main()
