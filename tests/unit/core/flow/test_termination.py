"""Requests to exit: SIGTERM, and the signal that Windows sends instead."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from barnraise.core.flow.termination import on_termination, stop_by_signals

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a process of Windows cannot signal itself so")


@pytest.fixture
def kept_handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
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


class _WithoutSignals(asyncio.SelectorEventLoop):
    """Event loop as on Windows, which has no handlers of signals."""

    def add_signal_handler(self, *_: object) -> None:
        raise NotImplementedError


@pytest.mark.usefixtures("kept_handlers")
@pytest.mark.parametrize("kind", [asyncio.SelectorEventLoop, _WithoutSignals])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_stop_a_loop(
    kind: type[asyncio.SelectorEventLoop], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)  # only Windows has it

    async def wait_for_signal() -> None:
        stopped = asyncio.Event()
        stop_by_signals(asyncio.get_running_loop(), stopped.set)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stopped.wait(), 30)

    with asyncio.Runner(loop_factory=kind) as runner:
        runner.run(wait_for_signal())
