"""Process of the held-out validation: ``FILE MODEL`` on the command line.

FILE is the owner's code, MODEL a safetensors file. Each line of standard input requests the loss of MODEL as
it is then. The answer is a line of JSON. The first answer comes without a request and tells whether FILE can
be used. The process ends when its input closes.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from barnraise.hub.aggregation.held_out_validation import HeldOutResult

Loss = Callable[[dict[str, torch.Tensor]], object]


def main(script: Path, model: Path) -> int:
    """Load the owner's loss function and answer requests until standard input closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the owner's code prints is no answer
    wanted: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(wanted,), daemon=True).start()
    try:
        loss = _load_loss(script)
    except Exception as error:  # noqa: BLE001  # the owner's code may raise any exception
        answers.write(_line(HeldOutResult(failed=f"{type(error).__name__}: {error}")))
        return 1
    answers.write(_line(HeldOutResult()))
    while wanted.get():
        answers.write(_line(_evaluate(loss, model)))
    return 0


def _listen(wanted: queue.Queue[bytes]) -> None:
    """Queue the requests, and exit when the hub is gone, even during a computation."""
    while line := sys.stdin.buffer.readline():
        wanted.put(line)
    os._exit(0)


def _load_loss(script: Path) -> Loss:
    """Import the owner's file and return its function ``loss``."""
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location("held_out", script)
    if spec is None or spec.loader is None:
        raise ImportError(f"{script.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    loss = getattr(module, "loss", None)
    if not callable(loss):
        raise AttributeError(f"{script.name} has no function loss(parameters)")
    return loss  # type: ignore[no-any-return]


def _evaluate(loss: Loss, model: Path) -> HeldOutResult:
    """Return the loss of the model, or the reason why there is none."""
    try:
        with torch.no_grad():
            value = float(loss(load_file(model)))  # type: ignore[arg-type]  # a result that is not a number becomes an error
    except Exception as error:  # noqa: BLE001
        return HeldOutResult(failed=f"{type(error).__name__}: {error}")
    return HeldOutResult(loss=value if math.isfinite(value) else None)


def _line(answer: HeldOutResult) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
