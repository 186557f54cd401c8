"""Thread for all disk work on records, in order: an entry is appended before the next one is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from barnraise.core.errors import BarnraiseError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class DiskThread:
    """One thread that runs functions in the order in which they are given."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "barnraise-history")

    async def run(self, work: Callable[[], T]) -> T:
        """Run a function and return its result."""
        return await asyncio.wrap_future(self._executor.submit(work))

    def submit(self, work: Callable[[], None]) -> None:
        """Run a function in the background; an error is logged."""
        self._executor.submit(work).add_done_callback(_log_failure)

    def close(self) -> None:
        """Take no more work."""
        self._executor.shutdown(wait=False)


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if isinstance(error, BarnraiseError | OSError):
        _log.error("an entry of a run's record was not written: %s", error)
    elif error is not None:
        _log.error("an entry of a run's record was not written", exc_info=error)
