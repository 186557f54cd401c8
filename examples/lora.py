"""Fits a trained model to a new task by training two thin matrices per layer only."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import barnraise


class Thin(nn.Module):
    """A frozen layer and a correction of low rank, which starts at zero."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def task(turn, count):
    """Return points on a plane, labelled by a spiral that starts at an angle."""
    draw = torch.Generator().manual_seed(7)
    points = torch.randn(count, 2, generator=draw)
    angle = torch.atan2(points[:, 1], points[:, 0]) + turn + 2 * points.norm(dim=1)
    return TensorDataset(points, (torch.sin(angle) > 0).long())


def trained_before(count):
    """Return the model that a user would download; here every machine trains the same one first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    points, labels = task(0.0, count).tensors
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
    return model


def right(model, data):
    points, labels = data.tensors
    with torch.no_grad():
        return float((model(points).argmax(1) == labels).float().mean())


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--small", action="store_true")
    small = options.parse_args().small
    count = 512 if small else 4096
    model, data = trained_before(count), task(1.0, count)
    before = right(model, data)
    for place in (0, 2, 4):
        model[place] = Thin(model[place], rank=4)
    thin = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(thin, lr=1e-2)

    run = barnraise.init(seed=3)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model, optimizer, batches = run.prepare(model, optimizer, loader)
    for _ in run.epochs(5 if small else 10):
        for batch in batches:
            for points, labels in batch:
                loss = nn.functional.cross_entropy(model(points), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
    if run.is_main:
        share = sum(parameter.numel() for parameter in thin) / sum(
            parameter.numel() for parameter in model.parameters()
        )
        after = right(model, data)
        print(f"{share:.0%} of the parameters were trained: {before:.0%} right before, {after:.0%} after")
    run.save("lora.safetensors")


if __name__ == "__main__":
    main()
