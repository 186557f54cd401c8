"""Starts a communication process with two private channels and its environment. Torch-free."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from barnraise.core.config import Settings, state_directory
from barnraise.transport.links.tls import write_openssl_conf


def start_comm_process(
    run: str, generation: int, settings: Settings
) -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket]:
    """Start a communication process. Return it with our ends of the common and the direct channel."""
    channel, their_channel = socket.socketpair()
    direct, their_direct = socket.socketpair()
    if sys.platform == "win32":  # there a pair is two TCP sockets, which would hold small messages back
        for sock in (channel, their_channel, direct, their_direct):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        process = _spawn([their_channel, their_direct], run, generation, settings)
    except BaseException:
        channel.close()
        direct.close()
        raise
    finally:
        their_channel.close()
        their_direct.close()
    return process, channel, direct


def _spawn(
    theirs: list[socket.socket], run: str, generation: int, settings: Settings
) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment["OPENSSL_CONF"] = str(write_openssl_conf(state_directory(settings)))
    source = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH", "")]))
    command = [
        sys.executable,
        "-P",  # a file in the working directory must not replace a standard module
        "-m",
        "barnraise.collectives.comm_process",
        *(str(sock.fileno()) for sock in theirs),
        run,
        str(generation),
    ]
    if sys.platform == "win32":
        # The python.exe of a virtual environment only starts another process, which has another id. A socket
        # is shared with a process id, so the interpreter itself is started, as multiprocessing does.
        command[0] = sys._base_executable  # type: ignore[attr-defined]
        environment["__PYVENV_LAUNCHER__"] = sys.executable
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
        assert process.stdin is not None
        for sock in theirs:
            process.stdin.write(sock.share(process.pid).hex().encode() + b"\n")
        process.stdin.close()
        return process
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[sock.fileno() for sock in theirs]
    )
