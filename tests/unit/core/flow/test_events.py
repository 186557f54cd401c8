"""Waits that a change ends early."""

from __future__ import annotations

import asyncio

from barnraise.core.flow.events import ChangeEvent, Wakeup


def test_change_event_wakes_every_waiting_task_once() -> None:
    async def story() -> None:
        event = ChangeEvent()
        event.announce()
        assert not await event.wait(0.0), "a change before the wait is not seen"
        waits = [asyncio.create_task(event.wait(60.0)) for _ in range(3)]
        await asyncio.sleep(0)
        event.announce()
        assert await asyncio.gather(*waits) == [True] * 3
        assert not await event.wait(0.01)

    asyncio.run(story())


def test_wakeup_before_sleep_is_remembered_once() -> None:
    async def story() -> None:
        wakeup = Wakeup()
        wakeup.wake()
        async with asyncio.timeout(30):
            await wakeup.sleep(60.0)
        await wakeup.sleep(0.01)
        sleep = asyncio.create_task(wakeup.sleep(60.0))
        await asyncio.sleep(0)
        wakeup.wake()
        async with asyncio.timeout(30):
            await sleep

    asyncio.run(story())
