"""Prevents system sleep while a run needs the machine, with the means of each operating system."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_CONTINUOUS = 0x80000000  # ES_CONTINUOUS
_SYSTEM_REQUIRED = 0x00000001  # ES_SYSTEM_REQUIRED
_END_S = 1.0
_MAX_REASON = 500

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def keep_awake(why: str) -> Iterator[None]:
    """Keep the system awake inside the context; ``why`` is shown by the system.

    Without a suitable tool only a log line is written.
    """
    if sys.platform == "win32":
        with _awake_by_thread(_execution_state()):
            yield
    else:
        with _awake_by_tool(tool_for(sys.platform, why)):
            yield


def tool_for(platform: str, why: str) -> list[str]:
    """Return the command that prevents sleep while it runs; it exits with its input or with this process."""
    if platform == "darwin":
        return ["caffeinate", "-i", "-w", str(os.getpid())]
    return [
        *("systemd-inhibit", "--what=idle:sleep", "--mode=block"),
        *("--who=Barnraise", f"--why={why}", "cat"),
    ]


@contextlib.contextmanager
def _awake_by_tool(command: Sequence[str]) -> Iterator[None]:
    if shutil.which(command[0]) is None:
        _log.info("%s is not installed: this machine may fall asleep during a run", command[0])
        yield
        return
    pipe = subprocess.PIPE
    tool = subprocess.Popen(
        command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, start_new_session=True
    )
    wanted = threading.Event()
    wanted.set()
    watcher = threading.Thread(target=_tell_if_refused, args=(tool, wanted), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        wanted.clear()
        assert tool.stdin is not None
        tool.stdin.close()
        tool.terminate()
        watcher.join(_END_S)
        if watcher.is_alive():
            tool.kill()


def _tell_if_refused(tool: subprocess.Popen[bytes], wanted: threading.Event) -> None:
    """Log a tool that exits by itself, because the system refused it."""
    assert tool.stderr is not None
    with tool.stderr:
        reason = tool.stderr.read()[-_MAX_REASON:].decode("utf-8", "replace").strip()
    tool.wait()
    if wanted.is_set():
        _log.info("this machine may fall asleep during a run: %s", reason or f"code {tool.returncode}")


@contextlib.contextmanager
def _awake_by_thread(set_state: Callable[[int], object]) -> Iterator[None]:
    """Keep Windows awake, with a thread of its own.

    Windows stores the request per thread, so that two runs do not cancel each other.
    """
    done = threading.Event()

    def hold() -> None:
        if not set_state(_CONTINUOUS | _SYSTEM_REQUIRED):
            _log.info("Windows refused: this machine may fall asleep during a run")
        done.wait()
        set_state(_CONTINUOUS)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    try:
        yield
    finally:
        done.set()
        holder.join(_END_S)


def _execution_state() -> Callable[[int], object]:
    kernel: Any = getattr(ctypes, "WinDLL")("kernel32")  # noqa: B009  # exists on Windows only
    kernel.SetThreadExecutionState.argtypes = (ctypes.c_uint32,)
    kernel.SetThreadExecutionState.restype = ctypes.c_uint32
    call: Callable[[int], object] = kernel.SetThreadExecutionState
    return call
