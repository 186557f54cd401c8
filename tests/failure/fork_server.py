"""Fork server: imports torch once and forks workers, which execute ``bodies`` until they are told to exit.

``python -m tests.failure.fork_server SOCKET``: SOCKET is the driver's Unix socket (see ``worker_pool``).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo  # DDP needs it: imported once, before the forks

import barnraise.collectives.c10d.create  # noqa: F401
from tests.failure import bodies, rpc_bodies
from tests.json_socket import JsonSocket

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


def main(socket_path: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed workers leave no zombies
    json_socket = JsonSocket.dial(socket_path)
    json_socket.send({"fork_server": os.getpid()})
    gc.freeze()
    while (request := json_socket.receive(None)) is not None:
        if os.fork() == 0:
            json_socket.close()
            _become(request)
            _serve(socket_path, str(request["label"]))
            return  # an ordinary end of the interpreter, exit handlers included


def _become(request: Mapping[str, Any]) -> None:
    """Turn the forked child into the requested worker."""
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


def _serve(socket_path: str, label: str) -> None:
    json_socket = JsonSocket.dial(socket_path)
    json_socket.send({"label": label, "pid": os.getpid()})
    while (request := json_socket.receive(None)) is not None:
        body = request.pop("body")
        if body == "exit":
            json_socket.send({"ok": None})
            return
        try:
            json_socket.send({"ok": _find(body)(**request)})
        except Exception:
            json_socket.send({"error": traceback.format_exc()})


def _find(body: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(bodies, body, None) or getattr(rpc_bodies, body)
    return function


if __name__ == "__main__":
    main(sys.argv[1])
