"""One call on a daemon thread, so that a disk or a peer that hangs does not hang the caller."""

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


class BackgroundCall(Generic[T]):
    """One call on a thread of its own, with its result or its exception."""

    def __init__(
        self, work: Callable[[], T], name: str = "barnraise-background", *, is_daemon: bool = True
    ) -> None:
        """Start the call now. Without ``is_daemon``, the interpreter waits for its end before it exits."""
        self._work = work
        self._results: list[T] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=is_daemon)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Return True once the call has returned or raised."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the end of the call, at most ``seconds``."""
        self._thread.join(seconds)

    def result(self) -> T:
        """Wait for the end of the call and return its result, or raise its exception."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._failure = error


class DeadlineExceeded(msgspec.Struct, frozen=True):
    """Checks without a result, and the reason."""

    names: tuple[str, ...]
    why: str


class DeadlineCall(Generic[T]):
    """One call on a daemon thread whose result must be there by a deadline."""

    def __init__(self, names: tuple[str, ...], work: Callable[[], T]) -> None:
        self.names = names
        self._call = BackgroundCall(work)

    def result(self, deadline: float) -> T | DeadlineExceeded:
        """Return the result, or DeadlineExceeded if the call failed or is still running by then."""
        self._call.wait(max(0.0, deadline - time.monotonic()))
        if not self._call.has_ended:
            return DeadlineExceeded(self.names, "it did not answer in time")
        try:
            return self._call.result()
        except BarnraiseError as error:
            return DeadlineExceeded(self.names, error.message)
        except BaseException as error:  # noqa: BLE001 - one check that fails must not hide the others
            return DeadlineExceeded(self.names, f"the check failed: {type(error).__name__}: {error}")


def start_in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Start the call on a daemon thread and return its future.

    A cancelled future frees the caller at once. With `asyncio.to_thread`, the event loop would wait for the
    thread at its end.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(error: BaseException | None, results: list[T]) -> None:
        if future.done():  # cancelled meanwhile
            return
        if error is None:
            future.set_result(results[0])
        else:
            future.set_exception(error)

    def run() -> None:
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - passed on to the future
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, failure, results)

    threading.Thread(target=run, daemon=True).start()
    return future
