"""Memory that a worker may use on its machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

# The limit of a container or a service, in version 2 and in version 1 of Linux's control groups.
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def used_memory(device: torch.device) -> int:
    """Return the bytes that this process and those that it has started take on a device.

    Of an accelerator it is 0: programs are not in its memory.
    """
    if device.type != "cpu":
        return 0
    own = psutil.Process()
    total = int(own.memory_info().rss)
    for child in own.children(recursive=True):
        try:
            total += int(child.memory_info().rss)
        except psutil.Error:  # it has ended
            continue
    return total


def usable_memory(device: torch.device) -> int:
    """Return the bytes of memory on a device; of the CPU, what the control group of this process allows."""
    if device.type != "cpu":
        try:
            return int(torch.accelerator.get_memory_info(device)[1])
        except (RuntimeError, NotImplementedError, AttributeError):  # MPS shares the computer's memory
            pass
    return min([int(psutil.virtual_memory().total), *_group_limits()])


def _group_limits() -> list[int]:
    """Return the limits of this process's control group and of those above it."""
    limits = []
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        group = _ROOT / controllers / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(_ROOT):
                break
            for name in _LIMITS:
                try:
                    limits.append(int((folder / name).read_text()))
                except (OSError, ValueError):  # there is none, or the word "max"
                    continue
    return limits
