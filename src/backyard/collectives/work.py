"""What a collective returns: done, failed or waited for, in the ways that Python and C++ each expect.

C++ does not see an exception set on a torch future; it does see one raised in a ``then`` callback. So the
future handed out is always such a callback's, and DDP survives a failed operation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from backyard.core.errors import CollectiveError, OperationTimeout

Result = list[torch.Tensor]


class BackyardWork(dist.Work):
    """One operation, made of one or more pieces in flight together."""

    def __init__(self, result: Result, pieces: int, what: str) -> None:
        super().__init__()
        self._result = result
        self._left = pieces
        self._what = what
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: CollectiveError | None = None
        self._base: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._source = -1
        self._listeners: list[Callable[[BackyardWork], None]] = []
        self.finish: Callable[[], None] | None = None
        self.issued_at_ns = time.monotonic_ns()
        self.finished_at_ns: int | None = None

    # the backend's side

    def piece_done(self, at_ns: int, source: int = -1) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
            self.finished_at_ns = max(at_ns, self.finished_at_ns or 0)
            self._source = max(self._source, source)
        if last:
            if self.finish is not None and self._error is None:
                self.finish()
            self._end()

    def fail(self, error: CollectiveError) -> None:
        with self._lock:
            if self._error is not None or self._ended.is_set():
                return
            self._error = error
        self._end()

    def after(self, listener: Callable[[BackyardWork], None]) -> None:
        """Call when it has ended, at once if it has."""
        with self._lock:
            if not self._ended.is_set():
                self._listeners.append(listener)
                return
        listener(self)

    @property
    def error(self) -> CollectiveError | None:
        return self._error

    def _end(self) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            base = self._base
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(self)
        if base is not None:
            base.set_result(None)

    # torch's side

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> CollectiveError | None:
        return self._error

    def result(self) -> Result:
        return self._result

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it has ended; raises what went wrong. A time-out here cancels nothing."""
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        if not self._ended.wait(seconds):
            raise OperationTimeout(
                f"{self._what} has not ended within the {seconds:g} s that were waited; it goes on",
                hint="Wait again, or abort the group.",
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                self._base = torch.futures.Future()
                self._future = self._base.then(self._settle)
                fire = self._ended.is_set()
            else:
                fire = False
            future = self._future
            base = self._base
        if fire and base is not None:
            base.set_result(None)
        return future

    def _settle(self, _: torch.futures.Future[None]) -> Result:
        if self._error is not None:
            raise self._error
        return self._result
