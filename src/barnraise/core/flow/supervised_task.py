"""Work in the background of a hub that must not end without a word, whatever happens to one turn of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from barnraise.core.errors import BarnraiseError

logger = logging.getLogger(__name__)


async def until_over(turn: Callable[[], Awaitable[bool]], complaint: str, pause_s: float) -> None:
    """Turn by turn, until one says that it was the last."""
    while True:
        try:
            if await turn():
                return
        except BarnraiseError as error:
            logger.warning("%s", error.message)
            await asyncio.sleep(pause_s)
        except Exception:  # nobody waits for this task: it would only be gone
            logger.exception("%s, it is tried again", complaint)
            await asyncio.sleep(pause_s)
