"""Scheduling priority: asks the system to run the communication process soon after it wakes.

It sleeps most of the time, so other processes lose nothing. A request that the system refuses is ignored.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys

import psutil

_SLICE_NS = 100_000  # Linux 6.12 and later: a shorter slice means an earlier turn
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("<IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_LITTLE_MORE = -5


def raise_priority() -> None:
    if sys.platform == "win32":
        with contextlib.suppress(psutil.Error, OSError):
            psutil.Process().nice(psutil.ABOVE_NORMAL_PRIORITY_CLASS)
        return
    with contextlib.suppress(PermissionError, OSError):  # needs administrator rights
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _LITTLE_MORE)
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, 0, nice, 0, _SLICE_NS, 0, 0)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0)
