"""``python -m barnraise.collectives.comm_process CHANNEL DIRECT RUN GENERATION``: only a worker starts it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys

import numpy as np

from barnraise.collectives.comm_process.process import CommProcess, refuse
from barnraise.collectives.comm_process.scheduling import ask_for_promptness
from barnraise.core.config import load_settings
from barnraise.core.errors import BarnraiseError


def main(arguments: list[str]) -> int:
    # Both are the worker's, which may want to save something first; we end when it does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=os.environ.get("BARNRAISE_LOG", "WARNING").upper(),
        format=f"%(asctime)s mover[{os.getpid()}] %(levelname)s %(message)s",
    )
    channel, direct = _socket(arguments[0]), _socket(arguments[1])
    try:
        mover = CommProcess(channel, direct, load_settings(), arguments[2], int(arguments[3]))
    except BarnraiseError as error:
        refuse(channel, error)
        return 1
    np.seterr(all="ignore")  # an overflow is the program's: it shows in the numbers, as in torch
    ask_for_promptness()
    gc.freeze()  # what start-up made lives for ever: no later collection needs to look at it
    gc.set_threshold(20_000, 10, 10)  # an operation makes no cycles, so looking for them rarely is enough
    mover.serve()
    return 0


def _socket(argument: str) -> socket.socket:
    if sys.platform == "win32":
        return socket.fromshare(bytes.fromhex(sys.stdin.readline().strip()))
    return socket.socket(fileno=int(argument))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
