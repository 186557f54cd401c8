"""Requests to exit: SIGTERM, and the signal that Windows sends instead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from barnraise.core.flow.termination import on_termination

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a process of Windows cannot signal itself so")


@pytest.fixture
def kept_handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("kept_handlers")
def test_handler_gets_both_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)  # only Windows has it
    received = []
    on_termination(lambda number, frame: received.append(number))
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    assert received == [signal.SIGTERM, signal.SIGUSR1]
