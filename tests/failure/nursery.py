"""Imports torch once and forks workers on request; a worker executes ``bodies`` until it is told to exit.

``python -m tests.failure.nursery DOOR``: DOOR is the driver's Unix socket (see ``crew``).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo  # DDP needs it: imported once, before the forks

import barnraise.collectives.process_group  # noqa: F401
from tests.failure import bodies
from tests.failure.line import Line

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


def main(door: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed workers leave no zombies
    line = Line.dial(door)
    line.send({"nursery": os.getpid()})
    gc.freeze()
    while (request := line.receive(None)) is not None:
        if os.fork() == 0:
            line.close()
            _become(request)
            _serve(door, str(request["label"]))
            return  # an ordinary end of the interpreter, exit handlers included


def _become(request: Mapping[str, Any]) -> None:
    """Turn the forked child into the worker that was asked for."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request["namespace"] is not None:
        descriptor = os.open(request["namespace"], os.O_RDONLY)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns failed")
        os.close(descriptor)
    os.environ.update(request["environment"])
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _serve(door: str, label: str) -> None:
    line = Line.dial(door)
    line.send({"label": label, "pid": os.getpid()})
    while (request := line.receive(None)) is not None:
        body = request.pop("body")
        if body == "exit":
            line.send({"ok": None})
            return
        try:
            line.send({"ok": getattr(bodies, body)(**request)})
        except Exception:
            line.send({"error": traceback.format_exc()})


if __name__ == "__main__":
    main(sys.argv[1])
