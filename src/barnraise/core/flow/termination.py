"""Signals that ask a process to exit: SIGTERM, and SIGBREAK on Windows."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio  # only for the type: the supervisor starts without it

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


def stop_by_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> None:
    """Call ``stop`` in the loop when Ctrl-C, a signal or a console of Windows asks this process to exit."""
    for name in ("SIGINT", *_NAMES):
        number = getattr(signal, name, None)
        if number is None:
            continue
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:  # on Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
