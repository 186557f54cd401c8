"""Suspend events of the system, so that the agent can leave the cluster before the machine sleeps.

Linux: systemd-logind, through its own tools. Other systems send no event. There the failure detector notices
the silence, and the agent notices on waking that time has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence

_MONITOR = (
    "gdbus",
    "monitor",
    "--system",
    "--dest",
    "org.freedesktop.login1",
    "--object-path",
    "/org/freedesktop/login1",
)
# Sleep is delayed a few seconds while this runs; it is stopped after the goodbye.
_HOLD = (
    "systemd-inhibit",
    "--what=sleep",
    "--mode=delay",
    "--who=Barnraise",
    "--why=saying goodbye to the other machines",
    "cat",
)

_log = logging.getLogger(__name__)

Notice = Callable[[], Awaitable[None]]


async def watch_sleep(
    asleep: Notice,
    awake: Notice,
    monitor: Sequence[str] = _MONITOR,
    hold: Sequence[str] = _HOLD,
) -> None:
    """Call ``asleep`` before and ``awake`` after each sleep, until cancelled.

    Return at once if the system has no such tools.
    """
    if sys.platform != "linux" or shutil.which(monitor[0]) is None:
        return
    pipe = asyncio.subprocess.PIPE
    null = asyncio.subprocess.DEVNULL
    watcher = await asyncio.create_subprocess_exec(*monitor, stdin=null, stdout=pipe, stderr=null)
    holder = await _take(hold)
    try:
        assert watcher.stdout is not None
        while line := await watcher.stdout.readline():
            if b"PrepareForSleep" not in line:
                continue
            if b"true" in line:
                await asleep()
                await _end(holder)
                holder = None
            else:
                await awake()
                holder = holder or await _take(hold)
        _log.info("the system no longer reports suspend events")
    finally:
        await _end(watcher)
        await _end(holder)


async def _take(hold: Sequence[str]) -> asyncio.subprocess.Process | None:
    """Start the inhibitor, which delays sleep until its input is closed."""
    if shutil.which(hold[0]) is None:
        return None
    null = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(
        *hold, stdin=asyncio.subprocess.PIPE, stdout=null, stderr=null
    )


async def _end(process: asyncio.subprocess.Process | None) -> None:
    if process is None:
        return
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), 1.0)
