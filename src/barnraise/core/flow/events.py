"""Something changed: whoever waits for that looks again."""

from __future__ import annotations

import asyncio


class ChangeEvent:
    """For any number who wait, in one event loop. Each hears what is announced while it waits."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def announce(self) -> None:
        told, self._event = self._event, asyncio.Event()
        told.set()

    async def within(self, seconds: float) -> bool:
        """Whether there was any before the time was up."""
        event = self._event
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await event.wait()
        except TimeoutError:
            return False
        return True
