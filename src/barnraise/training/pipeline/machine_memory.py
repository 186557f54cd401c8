"""Memory that is free for a worker on its machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """Files of a control group. ``cache``: lines of its statistics that count droppable page cache."""

    limit: str
    usage: str
    cache: tuple[str, str]


# In version 2 and in version 1 of Linux's control groups: a container, a service, or a user's session.
_VERSIONS = (
    _Files("memory.max", "memory.current", ("active_file", "inactive_file")),
    _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, beside what this process and all others take.

    Of the CPU, the limits of this process's control groups count, too.
    """
    if device.type != "cpu":
        try:
            return int(torch.accelerator.get_memory_info(device)[0])
        except (RuntimeError, NotImplementedError, AttributeError):  # MPS shares the computer's memory
            pass
    return max(0, min([int(psutil.virtual_memory().available), *_free_in_groups()]))


def _free_in_groups() -> Iterator[int]:
    """Yield what is left below the limit of this process's control group, and of each one above it."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        group = _ROOT / controllers / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(_ROOT):
                break
            for files in _VERSIONS:
                try:
                    yield int((folder / files.limit).read_text()) - _held_bytes(folder, files)
                except (OSError, ValueError):  # there is none, or the word "max"
                    continue


def _held_bytes(folder: Path, files: _Files) -> int:
    """Return what a group holds, without page cache that the kernel can drop."""
    pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cache = sum(int(count) for name, count in pairs if name in files.cache)
    return int((folder / files.usage).read_text()) - cache
