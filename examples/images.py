"""A convolutional network tells circles, squares and crosses apart."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import barnraise

SIZE = 16


class Shapes(Dataset):
    """Noisy drawings; the same number always gives the same one, so nothing needs to be downloaded."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(self.first + index)
        kind = int(torch.randint(3, (1,), generator=draw))
        x, y = (torch.rand(2, generator=draw) * 6 + 5).tolist()
        size = float(torch.rand(1, generator=draw) * 2 + 3)
        rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        down, across = (rows - y).abs(), (columns - x).abs()
        if kind == 0:
            shape = ((down**2 + across**2).sqrt() - size).abs() < 0.8
        elif kind == 1:
            shape = (torch.maximum(down, across) - size).abs() < 0.8
        else:
            shape = ((down < 0.8) & (across < size)) | ((across < 0.8) & (down < size))
        noise = torch.randn(SIZE, SIZE, generator=draw) * 0.4
        return (shape.float() + noise)[None], kind


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, 3),
    )  # fmt: skip


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--small", action="store_true")
    small = options.parse_args().small
    run = barnraise.init(seed=1)
    torch.manual_seed(0)
    model = network().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Shapes(0, 512 if small else 8192), batch_size=64, shuffle=True)

    model, optimizer, batches = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(2 if small else 3):
        for batch in batches:
            for images, kinds in batch:
                loss = nn.functional.cross_entropy(model(images.to(run.device)), kinds.to(run.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
        if run.history:
            run.print(f"epoch {epoch}: loss {run.history[-1]['loss']:.3f} on {run.world} machines")

    if run.is_main:  # one of them is enough: all hold the same model
        model.eval()
        unseen = Shapes(1_000_000, 500 if small else 10_000)
        with torch.no_grad():
            right = sum(
                int((model(x.to(run.device)).argmax(1).cpu() == y).sum())
                for x, y in DataLoader(unseen, batch_size=500)
            )
        print(f"{right / len(unseen):.1%} of {len(unseen)} new images are told right")
    run.save("shapes.safetensors")


if __name__ == "__main__":
    main()
