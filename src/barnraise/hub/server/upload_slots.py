"""Places for the large bodies that members send: few at once, and nobody keeps the others out.

A body has its place until it was answered, and two minutes to arrive. If others wait for a place, those who
were there longest have ten seconds: then they are told to send less at once, which an honest slow line does.
So whoever sends byte by byte, with however many keys, costs the next one in the queue ten seconds.
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
    """Of one hub."""

    def __init__(self, at_once: int = AT_ONCE, of_one: int = OF_ONE, fair_s: float = FAIR_S) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._own = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(of_one))
        self._fair_s = fair_s
        self._reading: dict[asyncio.Timeout, float] = {}  # since when, the oldest first
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def place(self, member: str) -> AsyncIterator[None]:
        async with self._own[member]:
            self._waiting += 1
            try:
                self._hurry()
                await self._free.acquire()
            finally:
                self._waiting -= 1
            try:
                yield
            finally:
                self._free.release()

    @contextlib.asynccontextmanager
    async def reading(self, *, has_place: bool) -> AsyncIterator[None]:
        """HubRefused (408) if the body takes too long."""
        try:
            async with asyncio.timeout(DEADLINE_S) as deadline:
                if has_place:
                    self._reading[deadline] = asyncio.get_running_loop().time()
                try:
                    self._hurry()
                    yield
                finally:
                    self._reading.pop(deadline, None)
        except TimeoutError as error:
            raise HubRefused(408, "slow", "the body took too long", hint="Send less at once.") from error

    def _hurry(self) -> None:
        """For each who waits, the one that is longest here."""
        if not self._free.locked():
            return
        for deadline, since in list(self._reading.items())[: self._waiting]:
            until, now = since + self._fair_s, asyncio.get_running_loop().time()
            if not deadline.expired() and (at := deadline.when()) is not None and until < at:
                deadline.reschedule(max(now, until))
