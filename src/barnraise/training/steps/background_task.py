"""Work that others have a part in, in a thread of its own: a sum that is on its way, words with a hub."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """Everything that the work needs must be left alone until it has ended."""

    def __init__(self, work: Callable[[], Result], name: str = "barnraise-sum") -> None:
        self._work = work
        self._result: Result | None = None
        self._failure: BaseException | None = None
        is_on = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream() if is_on else None
        self._thread = threading.Thread(target=self._fly, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def result(self) -> Result:
        """Waits for it; raises what it ended with."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._result is not None
        return self._result

    def _fly(self) -> None:
        # What was handed in may still be computed by the stream of the script.
        ordered = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with ordered:
                self._result = self._work()
        except BaseException as error:  # noqa: BLE001  # told to whoever waits
            self._failure = error
