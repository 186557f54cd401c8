"""The process of a held-out check: ``python -m backyard.hub.trying FILE``. Its code is the owner's.

Each line of standard input names a model (safetensors); the answer is a line of JSON with its loss, or with
what went wrong. The first line is said without being asked: whether FILE can be used at all.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from backyard.hub.held_out import Answer

Loss = Callable[[dict[str, torch.Tensor]], object]


def main(script: Path) -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the owner's code prints is no answer
    try:
        loss = _loss_in(script)
    except Exception as error:  # noqa: BLE001  # it is the owner's code: whatever it raises is told
        _say(answers.write, Answer(failed=f"{type(error).__name__}: {error}"))
        return 1
    _say(answers.write, Answer())
    for line in sys.stdin:
        _say(answers.write, _tried(loss, Path(line.rstrip("\n"))))
    return 0


def _loss_in(script: Path) -> Loss:
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location("held_out", script)
    if spec is None or spec.loader is None:
        raise ImportError(f"{script.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loss = getattr(module, "loss", None)
    if not callable(loss):
        raise AttributeError(f"{script.name} has no function loss(parameters)")
    return loss  # type: ignore[no-any-return]


def _tried(loss: Loss, model: Path) -> Answer:
    try:
        with torch.no_grad():
            found = float(loss(load_file(model)))  # type: ignore[arg-type]  # whatever it gives is a number or told
    except Exception as error:  # noqa: BLE001
        return Answer(failed=f"{type(error).__name__}: {error}")
    return Answer(loss=found if math.isfinite(found) else None)


def _say(write: Callable[[bytes], object], answer: Answer) -> None:
    write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
