"""Work that may hang, with a deadline: a disk or a line that does not answer must not hang a command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from backyard.core.errors import BackyardError

T = TypeVar("T")


class LeftOut(msgspec.Struct, frozen=True):
    """Checks that were not made, and why."""

    names: tuple[str, ...]
    why: str


class Later(Generic[T]):
    """Work on a thread of its own, which ends with the process."""

    def __init__(self, names: tuple[str, ...], work: Callable[[], T]) -> None:
        self.names = names
        self._found: list[T] = []
        self._error = ""
        self._thread = threading.Thread(target=self._do, args=(work,), daemon=True)
        self._thread.start()

    def result(self, deadline: float) -> T | LeftOut:
        """What it found by then, or why it did not."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._found:
            return self._found[0]
        return LeftOut(self.names, self._error or "it did not answer in time")

    def _do(self, work: Callable[[], T]) -> None:
        try:
            self._found.append(work())
        except BackyardError as error:
            self._error = error.message
        except Exception as error:  # noqa: BLE001 - one look that fails must not hide what the others see
            self._error = f"it could not be looked at: {type(error).__name__}: {error}"
