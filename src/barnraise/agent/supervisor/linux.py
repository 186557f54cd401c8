"""Features of Linux: the parent-death signal, adoption of orphans, and out-of-memory kills."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.01

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent thread is gone; call between fork and exec."""
    if sys.platform != "linux":
        raise NotImplementedError
    assert _libc is not None
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent exits (subreaper)."""
    assert _libc is not None
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own: Iterable[int]) -> None:
    """Collect adopted processes that have exited (zombies), except those in ``own``."""
    if sys.platform != "linux":
        raise NotImplementedError
    own_pids = set(own)
    while True:
        try:
            exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exited is None or exited.si_pid in own_pids:
                return
            os.waitpid(exited.si_pid, os.WNOHANG)
        except ChildProcessError:
            return


def kill_descendants(deadline_s: float) -> bool:
    """Kill and reap all descendants of this process; return True if none is left."""
    if sys.platform != "linux":
        raise NotImplementedError
    deadline = time.monotonic() + deadline_s
    while True:
        reap_orphans(())
        left = _descendants(os.getpid())
        if not left:
            return True
        if time.monotonic() > deadline:
            return False
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has exited
        time.sleep(_PAUSE_S)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_bytes()
            except OSError:
                continue  # it has exited
            # The name in parentheses may hold anything; state and parent follow it.
            children.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(entry))
    pids = list(children.get(root, ()))
    for pid in pids:
        pids += children.get(pid, ())
    return pids


def memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the kernel has killed for lack of memory, or None if unknown."""
    try:
        lines = vmstat.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
