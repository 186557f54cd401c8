"""Entry point ``python -m barnraise.collectives.comm_process CHANNEL DIRECT RUN GENERATION``.

Only a worker starts it.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

import numpy as np

from barnraise.collectives.comm_process.process import CommProcess, report_start_error
from barnraise.collectives.comm_process.scheduling import raise_priority
from barnraise.core.config import load_settings
from barnraise.core.errors import BarnraiseError
from barnraise.core.flow.console_log import install_process_log
from barnraise.core.flow.termination import on_termination


def main(arguments: list[str]) -> int:
    # Both are for the worker, which may save something first; we exit with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_termination(signal.SIG_IGN)
    install_process_log(
        os.environ.get("BARNRAISE_LOG", "WARNING").upper(),
        f"%(asctime)s comm-process[{os.getpid()}] %(levelname)s %(message)s",
    )
    channel, direct = _socket(arguments[0]), _socket(arguments[1])
    try:
        comm_process = CommProcess(channel, direct, load_settings(), arguments[2], int(arguments[3]))
    except BarnraiseError as error:
        report_start_error(channel, error)
        return 1
    np.seterr(all="ignore")  # an overflow shows in the numbers, as in torch
    raise_priority()
    gc.freeze()  # objects of the start are permanent: no later collection scans them
    gc.set_threshold(20_000, 10, 10)  # operations create no cycles, so rare collections are enough
    comm_process.serve()
    return 0


def _socket(argument: str) -> socket.socket:
    if sys.platform == "win32":
        return socket.fromshare(bytes.fromhex(sys.stdin.readline().strip()))
    return socket.socket(fileno=int(argument))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
