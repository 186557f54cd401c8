"""Batch inference: a trained model labels many images, each on a machine that is free.

    python images.py                 # trains, and writes shapes.safetensors
    barnraise run predict.py         # or: python predict.py

The labels are those of one machine, and each image is labelled once, also if a machine is switched off.
"""

import argparse
from collections import Counter
from pathlib import Path

import torch
from images import Shapes, network
from safetensors.torch import load_file

import barnraise


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--small", action="store_true")
    small = options.parse_args().small
    run = barnraise.init()
    torch.manual_seed(0)
    model = network().to(run.device).eval()
    if Path("shapes.safetensors").exists():
        model.load_state_dict(load_file("shapes.safetensors"))
    images = Shapes(2_000_000, 2_000 if small else 100_000)
    batch = 250  # one item of the map: large enough for a GPU, small enough to be shared

    def label(first):
        pixels = torch.stack([images[number][0] for number in range(first, first + batch)])
        with torch.no_grad():
            return model(pixels.to(run.device)).argmax(1)

    labels = torch.cat(run.map(label, range(0, len(images), batch)))
    Path("labels.txt").write_text("\n".join(map(str, labels.tolist())))  # on every machine, the same
    run.print(
        f"{len(labels)} images on {run.world} machines: {dict(sorted(Counter(labels.tolist()).items()))}"
    )


if __name__ == "__main__":
    main()
