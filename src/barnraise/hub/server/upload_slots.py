"""Upload slots: a limit on the large bodies that members send at once.

A body holds its slot until its response is sent, and has two minutes to arrive. If other members wait for a
slot, the longest holders get ten seconds. After that they must send smaller pieces, which an honest slow line
does. So a member that trickles bytes delays the next in the queue by ten seconds at most.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator

from barnraise.core.errors import HubRefused

AT_ONCE, OF_ONE = 16, 2
DEADLINE_S = 120.0
FAIR_S = 10.0  # 1 MiB at 0.8 Mbit/s


class UploadSlots:
    """Semaphore for large bodies, in total and per member."""

    def __init__(self, at_once: int = AT_ONCE, of_one: int = OF_ONE, fair_s: float = FAIR_S) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._own = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(of_one))
        self._fair_s = fair_s
        self._reading: dict[asyncio.Timeout, float] = {}  # since when, the oldest first
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def slot(self, member: str) -> AsyncIterator[None]:
        """Hold an upload slot of a member while the context is open."""
        async with self._own[member]:
            self._waiting += 1
            try:
                self._shorten_deadlines()
                await self._free.acquire()
            finally:
                self._waiting -= 1
            try:
                yield
            finally:
                self._free.release()

    @contextlib.asynccontextmanager
    async def reading(self, *, has_slot: bool) -> AsyncIterator[None]:
        """Limit the time to read a body. Raise HubRefused (408) if it takes too long."""
        try:
            async with asyncio.timeout(DEADLINE_S) as deadline:
                if has_slot:
                    self._reading[deadline] = asyncio.get_running_loop().time()
                try:
                    self._shorten_deadlines()
                    yield
                finally:
                    self._reading.pop(deadline, None)
        except TimeoutError as error:
            raise HubRefused(408, "slow", "the body took too long", hint="Send less at once.") from error

    def _shorten_deadlines(self) -> None:
        """Reduce the deadlines of the longest holders, one per waiting member."""
        if not self._free.locked():
            return
        for deadline, since in list(self._reading.items())[: self._waiting]:
            until, now = since + self._fair_s, asyncio.get_running_loop().time()
            if not deadline.expired() and (at := deadline.when()) is not None and until < at:
                deadline.reschedule(max(now, until))
