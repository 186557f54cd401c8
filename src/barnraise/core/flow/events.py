"""Change notification inside one event loop: a wait that a change or a time limit ends."""

from __future__ import annotations

import asyncio


async def _wait_up_to(event: asyncio.Event, seconds: float) -> bool:
    """Return True if the event was set before the time was up."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return False
    return True


class ChangeEvent:
    """Change notification for any number of waiting tasks. A change before the wait is not seen."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def announce(self) -> None:
        """Wake every task that waits now."""
        current, self._event = self._event, asyncio.Event()
        current.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for a change and return True; return False after ``seconds`` without one."""
        return await _wait_up_to(self._event, seconds)


class Wakeup:
    """Interruptible sleep of one loop. A wake before the sleep is remembered."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        """End the current sleep, or else the next one."""
        self._event.set()

    async def sleep(self, seconds: float) -> None:
        """Sleep until the time is up or a wake; return at once after a wake since the last sleep."""
        await _wait_up_to(self._event, seconds)
        self._event.clear()
