"""A sleep that somebody else can end early."""

from __future__ import annotations

import asyncio

_END_S = 5.0


class Wakeup:
    """The pause of a service's loop: until the time is up, or until there is news."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()

    async def sleep(self, seconds: float) -> None:
        """Returns at once if it rang since the last sleep."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._event.wait()
        except TimeoutError:
            pass  # the time is up, as asked
        self._event.clear()


async def end_task(task: asyncio.Task[None] | None) -> None:
    """Cancel a task of ours and wait until it is gone, but not for ever."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task], timeout=_END_S)
