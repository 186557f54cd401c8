"""A small convolutional network learns the digits of MNIST, from the four files that MNIST consists of.

    python digits.py                 # alone
    barnraise run digits.py          # on all machines of a cluster
    barnraise hub up digits.py       # with friends over the internet

The files, packed with gzip or not, are in the folder mnist beside this script, or where --data says.
"""

import argparse
import gzip
import os
import struct
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import barnraise


def read_idx(folder, name):
    """Return the numbers of an IDX file: a head with their type and shape, then one byte for each."""
    path = next((path for path in (Path(folder, name), Path(folder, f"{name}.gz")) if path.exists()), None)
    if path is None:
        raise SystemExit(
            f"the folder {folder} has neither {name} nor {name}.gz: put MNIST there, or use --data"
        )
    data = path.read_bytes()
    data = bytearray(gzip.decompress(data) if path.suffix == ".gz" else data)
    kind, dimensions = struct.unpack_from(">HBB", data)[1:]
    if kind != 8:
        raise SystemExit(f"{path} is no IDX file of bytes: fetch it again")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    return torch.frombuffer(data, dtype=torch.uint8, offset=4 + 4 * dimensions).reshape(shape)


def digits(folder, part):
    """Return the images and labels of a part: train or t10k (the ten thousand for tests)."""
    images, labels = (
        read_idx(folder, f"{part}-images-idx3-ubyte"),
        read_idx(folder, f"{part}-labels-idx1-ubyte"),
    )
    return TensorDataset(images[:, None], labels.long())


class Network(nn.Sequential):
    """Two convolutions and two linear layers, for images of 28 x 28 bytes."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images):
        return super().forward(images.float() / 255)


def arguments(description):
    options = argparse.ArgumentParser(description=description.partition("\n")[0])
    default = os.environ.get("BARNRAISE_DATA_MNIST", "mnist")  # set by: barnraise run --data mnist=FOLDER
    options.add_argument("--data", default=default, metavar="FOLDER", help="where the files of MNIST are")
    return options


def main():
    options = arguments(__doc__)
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--batch", type=int, default=256, help="samples of a step, on all machines together")
    given = options.parse_args()

    run = barnraise.init(seed=1)
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(digits(given.data, "train"), batch_size=given.batch, shuffle=True)

    model, optimizer, batches = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(given.epochs):
        before = len(run.history)
        for batch in batches:
            for images, labels in batch:  # on run.device, as the model
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
        losses = [step["loss"] for step in run.history[before:]]
        if losses:
            loss = sum(losses) / len(losses)
            run.print(f"epoch {epoch + 1} of {given.epochs}: loss {loss:.4f}, workers: {run.world}")
    run.save("digits.safetensors")
    run.print("saved: digits.safetensors")


if __name__ == "__main__":
    main()
