"""Background tasks of an event loop: one that survives errors, and how to cancel one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from barnraise.core.errors import BarnraiseError

logger = logging.getLogger(__name__)

_CANCEL_S = 5.0


async def run_until_done(step: Callable[[], Awaitable[bool]], complaint: str, pause_s: float) -> None:
    """Repeat ``step`` until it returns True. After an error, log it and retry ``pause_s`` seconds later."""
    while True:
        try:
            if await step():
                return
        except BarnraiseError as error:
            logger.warning("%s", error.message)
            await asyncio.sleep(pause_s)
        except Exception:  # nothing awaits this task: an error would only be lost
            logger.exception("%s; retrying in %g s", complaint, pause_s)
            await asyncio.sleep(pause_s)


async def cancel_task(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait until it has ended, for a few seconds at most."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_S)
