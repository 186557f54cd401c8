"""Work that may hang, with a deadline: a disk or a line that does not answer must not hang a command."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from barnraise.core.errors import BarnraiseError

T = TypeVar("T")


class DeadlineExceeded(msgspec.Struct, frozen=True):
    """Checks that were not made, and why."""

    names: tuple[str, ...]
    why: str


class DeadlineCall(Generic[T]):
    """Work on a thread of its own, which ends with the process."""

    def __init__(self, names: tuple[str, ...], work: Callable[[], T]) -> None:
        self.names = names
        self._found: list[T] = []
        self._error = ""
        self._thread = threading.Thread(target=self._do, args=(work,), daemon=True)
        self._thread.start()

    def result(self, deadline: float) -> T | DeadlineExceeded:
        """What it found by then, or why it did not."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._found:
            return self._found[0]
        return DeadlineExceeded(self.names, self._error or "it did not answer in time")

    def _do(self, work: Callable[[], T]) -> None:
        try:
            self._found.append(work())
        except BarnraiseError as error:
            self._error = error.message
        except Exception as error:  # noqa: BLE001 - one look that fails must not hide what the others see
            self._error = f"it could not be looked at: {type(error).__name__}: {error}"


def begun(work: Callable[[], T]) -> asyncio.Future[T]:
    """On such a thread, for a command that has an event loop. Whoever gives up cancels it and is free: of
    `asyncio.to_thread` the loop would wait for the end, however long that takes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(error: BaseException | None, found: list[T]) -> None:
        if future.done():  # nobody wants it any more
            return
        if error is None:
            future.set_result(found[0])
        else:
            future.set_exception(error)

    def do() -> None:
        found: list[T] = []
        error: Exception | None = None
        try:
            found.append(work())
        except Exception as failed:  # noqa: BLE001 - whatever it is, whoever waits must hear of it
            error = failed
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, error, found)

    threading.Thread(target=do, daemon=True).start()
    return future
