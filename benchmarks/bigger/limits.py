"""Limits of lab hosts: memory and processor, by control groups (version 1 of Linux) that all processes enter.

Held memory is what the kernel charges to the group, without page cache that it can drop. That is anonymous
memory, shared memory, buffers of sockets, and other memory of the kernel. Two processes of a host that map
the same memory count once. Weights that are read from a file are page cache until they are copied.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from lab import Host

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "barnraise-bigger"
_PERIOD_US = 10_000  # short, so that a stage never stands still for long
_EVERY_S = 0.1
_REMOVED_S = 20.0
_LIMITS = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")  # what does not fit may not be swapped
_DROPPABLE = ("total_active_file", "total_inactive_file")


class Limit(NamedTuple):
    """Limits of all processes of a host together. ``cores``: seconds of a processor for each second."""

    memory_bytes: int
    cores: float


class LimitedHost(NamedTuple):
    """A host with the folder of its memory control group."""

    host: Host
    limit: Limit
    group: Path

    def held(self) -> int:
        """Return the bytes that the host's processes hold now."""
        usage = int((self.group / "memory.usage_in_bytes").read_text())
        return held_bytes(usage, (self.group / "memory.stat").read_text())

    @contextmanager
    def widened(self, share: float) -> Iterator[None]:
        """Raise the memory limit by a share for the time of a context."""
        names = [name for name in _LIMITS if (self.group / name).exists()]
        raised = round((1 + share) * self.limit.memory_bytes)
        for name in reversed(names):  # the limit with swap may not be below the other one
            (self.group / name).write_text(str(raised))
        try:
            yield
        finally:
            for name in names:
                (self.group / name).write_text(str(self.limit.memory_bytes))

    def oom_kills(self) -> int:
        """Return the number of processes that the kernel killed because of the memory limit."""
        return oom_kills((self.group / "memory.oom_control").read_text())


class HeldWatch:
    """Peaks of the memory that hosts hold, by place, read by a thread ten times a second.

    It watches in a context, which may be entered again later.
    """

    def __init__(self, hosts: Sequence[LimitedHost]) -> None:
        self._hosts = hosts
        self.peaks = [0] * len(hosts)
        self._ended = threading.Event()
        self._thread = threading.Thread()
        self._error: OSError | None = None

    def __enter__(self) -> HeldWatch:
        self._ended.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._error is not None:  # or its peaks would be too low
            raise self._error

    def over_limit(self) -> float:
        """Return the largest peak of a host over its limit."""
        return max(peak / host.limit.memory_bytes for peak, host in zip(self.peaks, self._hosts, strict=True))

    def _watch(self) -> None:
        try:
            while not self._ended.wait(_EVERY_S):
                for place, host in enumerate(self._hosts):
                    self.peaks[place] = max(self.peaks[place], host.held())
        except OSError as error:
            self._error = error


def held_bytes(usage: int, statistics: str) -> int:
    """Return the charged bytes without page cache that can be dropped; ``statistics``: memory.stat."""
    known = dict(line.split() for line in statistics.splitlines())
    return usage - sum(int(known[name]) for name in _DROPPABLE)


def oom_kills(control: str) -> int:
    """Return the number of processes that were killed; ``control``: memory.oom_control."""
    known = dict(line.split() for line in control.splitlines())
    return int(known["oom_kill"])


@contextmanager
def limited(hosts: Sequence[Host], limits: Sequence[Limit]) -> Iterator[list[LimitedHost]]:
    """Limit hosts: every process that starts in one from now on is in its groups. End all at the end."""
    if not (_ROOT / "memory" / "memory.limit_in_bytes").exists():
        raise SystemExit("hard memory limits need version 1 of control groups, mounted at /sys/fs/cgroup")
    _remove_abandoned()
    made: list[Path] = []
    result = []
    try:
        for host, limit in zip(hosts, limits, strict=True):
            memory, processor = (
                _ROOT / kind / f"{_PREFIX}-{os.getpid()}-{host.name}" for kind in ("memory", "cpu")
            )
            for folder in (memory, processor):
                folder.mkdir()
                made.append(folder)
            for name in _LIMITS:
                if (memory / name).exists():
                    (memory / name).write_text(str(limit.memory_bytes))
            (processor / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (processor / "cpu.cfs_quota_us").write_text(str(round(limit.cores * _PERIOD_US)))
            host.groups = [memory, processor]
            result.append(LimitedHost(host, limit, memory))
        yield result
    finally:
        for host in hosts:
            host.groups = ()
            host.kill_all()
        for folder in made:
            _remove(folder)


def _remove(group: Path) -> None:
    """Remove a group as soon as its last process has ended."""
    deadline = time.monotonic() + _REMOVED_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _remove_abandoned() -> None:
    """Remove groups of benchmarks that were killed. A group with a process stays."""
    for folder in _ROOT.glob(f"*/{_PREFIX}-*"):
        with suppress(OSError):
            folder.rmdir()
