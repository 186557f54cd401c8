"""Background tasks that survive errors."""

from __future__ import annotations

import asyncio
import logging

import pytest

from barnraise.core.errors import HubError
from barnraise.core.flow.supervised_task import cancel_task, run_until_done


def test_run_until_done_retries_after_any_error(caplog: pytest.LogCaptureFixture) -> None:
    errors = [HubError("the hub's log failed"), OSError("the disk is gone")]

    async def step() -> bool:
        if errors:
            raise errors.pop(0)
        return True

    with caplog.at_level(logging.WARNING):
        asyncio.run(run_until_done(step, "the mirror failed", 0.0))
    assert "the hub's log failed" in caplog.text
    assert "the mirror failed; retrying in 0 s" in caplog.text


def test_cancel_task_waits_for_end() -> None:
    async def story() -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        await cancel_task(task)
        assert task.cancelled()
        await cancel_task(None)

    asyncio.run(story())
