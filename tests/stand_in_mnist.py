"""A stand-in for MNIST: drawn digits in files of the same names and format."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch

# Three columns and five rows of each digit, row by row.
_DRAWINGS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001001010010",
    "111101111101111",
    "111101111001111",
)


def drawn_digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of 28 x 28 bytes, and their labels: each digit at a random place, with noise."""
    draw = torch.Generator().manual_seed(seed)
    shapes = torch.tensor([[int(pixel) for pixel in text] for text in _DRAWINGS]).reshape(10, 5, 3)
    shapes = shapes.repeat_interleave(4, 1).repeat_interleave(4, 2)
    labels = torch.randint(10, (count,), generator=draw)
    images = torch.randint(50, (count, 28, 28), generator=draw)
    down, across = torch.randint(5, (count,), generator=draw), torch.randint(7, (count,), generator=draw)
    for image, label, y, x in zip(images, labels, down, across, strict=True):
        image[y + 2 : y + 22, x + 5 : x + 17] += 200 * shapes[label]
    return images.to(torch.uint8), labels.to(torch.uint8)


def write_idx(path: Path, values: torch.Tensor) -> None:
    """Write bytes as an IDX file; one whose name ends with .gz is packed."""
    data = struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape) + values.numpy().tobytes()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


def write_mnist(folder: Path, train: int, test: int, suffix: str = ".gz") -> None:
    """Write the four files."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count, seed in (("train", train, 1), ("t10k", test, 2)):
        images, labels = drawn_digits(count, seed)
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", labels)
