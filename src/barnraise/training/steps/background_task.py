"""Background task: one call on its own thread, such as an all-reduce in flight or a request to the hub."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """A call on a thread. Do not change what it uses until it has ended."""

    def __init__(self, work: Callable[[], Result], name: str = "barnraise-reduce") -> None:
        self._work = work
        self._result: Result | None = None
        self._error: BaseException | None = None
        is_on = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream() if is_on else None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the call has ended, or for some seconds."""
        self._thread.join(seconds)

    def result(self) -> Result:
        """Wait for the call. Return its result or raise its exception."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        # The script's stream may still compute the input.
        ordered = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with ordered:
                self._result = self._work()
        except BaseException as error:  # noqa: BLE001  # raised again by `result`
            self._error = error
