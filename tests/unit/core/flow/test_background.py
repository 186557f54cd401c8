"""Calls on threads: results, failures and deadlines."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from barnraise.core.errors import ConfigError
from barnraise.core.flow.background import BackgroundCall, DeadlineCall, DeadlineExceeded, start_in_thread


def _fail() -> None:
    raise ConfigError("no such setting")


def test_background_call_returns_result_or_raises() -> None:
    assert BackgroundCall(lambda: 7).result() == 7
    with pytest.raises(ConfigError, match="no such setting"):
        BackgroundCall(_fail).result()


def test_background_call_that_hangs_does_not_hang_its_caller() -> None:
    released = threading.Event()
    call = BackgroundCall(released.wait)
    call.wait(0.01)
    assert not call.has_ended
    released.set()
    call.wait()
    assert call.has_ended


def test_deadline_call_names_checks_without_result() -> None:
    deadline = time.monotonic() + 30
    assert DeadlineCall(("disk",), lambda: 7).result(deadline) == 7
    assert DeadlineCall(("disk",), _fail).result(deadline) == DeadlineExceeded(("disk",), "no such setting")
    released = threading.Event()
    late = DeadlineCall(("disk",), released.wait).result(time.monotonic() + 0.01)
    assert late == DeadlineExceeded(("disk",), "it did not answer in time")
    released.set()


def test_start_in_thread_cancelled_future_frees_event_loop() -> None:
    released = threading.Event()

    async def story() -> int:
        hanging = start_in_thread(released.wait)
        hanging.cancel()
        with pytest.raises(ConfigError):
            await start_in_thread(_fail)
        return await start_in_thread(lambda: 7)

    assert asyncio.run(story()) == 7
    released.set()
