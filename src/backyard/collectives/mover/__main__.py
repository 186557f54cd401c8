"""``python -m backyard.collectives.mover DESCRIPTOR RUN GENERATION``: started by a worker, never by hand."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys

from backyard.collectives.mover.process import MoverProcess, refuse
from backyard.core.config import load_settings
from backyard.core.errors import BackyardError


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's; we end when it does
    logging.basicConfig(
        level=os.environ.get("BACKYARD_LOG", "WARNING").upper(),
        format=f"%(asctime)s mover[{os.getpid()}] %(levelname)s %(message)s",
    )
    channel = _channel(arguments[0])
    try:
        mover = MoverProcess(channel, load_settings(), arguments[1], int(arguments[2]))
    except BackyardError as error:
        refuse(channel, error)
        return 1
    gc.freeze()  # what start-up made lives for ever: no later collection needs to look at it
    mover.serve()
    return 0


def _channel(argument: str) -> socket.socket:
    if sys.platform == "win32":
        return socket.fromshare(bytes.fromhex(sys.stdin.readline().strip()))
    return socket.socket(fileno=int(argument))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
