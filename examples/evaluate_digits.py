"""The network that digits.py saved is tested on 10,000 images, each batch on a machine that is free.

    python digits.py                     # writes digits.safetensors
    barnraise run evaluate_digits.py     # or: python evaluate_digits.py

The numbers are those of one machine: each image counts once, also if a machine is switched off meanwhile.
"""

from pathlib import Path

import torch
from digits import Network, arguments, digits
from safetensors.torch import load_file

import barnraise


def main():
    options = arguments(__doc__)
    options.add_argument("--model", default="digits.safetensors", metavar="FILE", help="what digits.py saved")
    options.add_argument("--batch", type=int, default=250, help="images of one item of the map")
    given = options.parse_args()
    if not Path(given.model).exists():
        raise SystemExit(f"{given.model} is missing: train with digits.py, and copy it from barnraise-runs/")

    run = barnraise.init()
    model = Network().to(run.device).eval()
    model.load_state_dict(load_file(given.model))
    images, labels = digits(given.data, "t10k").tensors

    def answers_from(first):
        with torch.no_grad():
            return model(images[first : first + given.batch].to(run.device)).argmax(1)

    answers = torch.cat(run.map(answers_from, range(0, len(images), given.batch)))
    wrong = (answers != labels).nonzero().flatten().tolist()
    lines = ["image,digit,answer", *(f"{number},{labels[number]},{answers[number]}" for number in wrong)]
    Path("mistakes.csv").write_text("\n".join(lines) + "\n")  # on every machine, the same
    share = 1 - len(wrong) / len(images)
    run.print(f"{share:.2%} of {len(images)} images are right, workers: {run.world}")
    run.print(f"saved: mistakes.csv, with the {len(wrong)} others")


if __name__ == "__main__":
    main()
