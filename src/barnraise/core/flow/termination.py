"""Signals that ask a process to exit: SIGTERM, and SIGBREAK on Windows."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]
# Exit code of a process that was killed on Windows, which has no signals. No program exits with it.
WINDOWS_KILL_CODE = 0x0B4A9
_NAMES = ("SIGTERM", "SIGBREAK")  # Windows sends the second one, for CTRL_BREAK


def on_termination(handler: Handler | signal.Handlers) -> None:
    """Call the handler when this process is asked to exit. Only the main thread may set it."""
    for name in _NAMES:
        number = getattr(signal, name, None)
        if number is not None:
            signal.signal(number, handler)
