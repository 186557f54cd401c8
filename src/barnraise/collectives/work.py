"""What a collective returns: done, failed or waited for, in the ways that Python and C++ each expect.

C++ does not see an exception set on a torch future; it does see one raised in a ``then`` callback. So the
future handed out is always such a callback's, and DDP survives a failed operation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from barnraise.collectives import completion_thread
from barnraise.core.errors import CollectiveError, OperationTimeout

Result = list[torch.Tensor]


class BarnraiseWork(dist.Work):
    """One operation, made of one or more pieces. The reader thread ends it, any thread may look at it."""

    def __init__(
        self, result: Result, pieces: int, what: str, finish: Callable[[], None] | None = None
    ) -> None:
        """``finish`` runs when the last piece is there, before anyone sees the end."""
        super().__init__()
        self._result = result
        self._left = pieces
        self._what = what
        self._finish = finish
        self._lock = threading.Lock()
        self._over = False
        self._ended: threading.Event | None = None  # made only if somebody waits for another thread
        self._error: CollectiveError | None = None
        self._base: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Result] | None = None
        self._source = -1
        self._listeners: list[Callable[[BarnraiseWork], None]] = []
        self._reading = threading.Lock()
        self.read_reply: Callable[[Callable[[], bool], float | None], None] | None = None
        self.issued_at_ns = time.monotonic_ns()
        self.finished_at_ns: int | None = None

    # the backend's side

    def piece_done(self, at_ns: int, source: int = -1) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
            self.finished_at_ns = max(at_ns, self.finished_at_ns or 0)
            self._source = max(self._source, source)
        if not last:
            return
        if self._finish is not None and self._error is None:
            try:
                self._finish()
            except Exception as error:  # noqa: BLE001  # the work must end, whatever a device says
                self.fail(CollectiveError(f"the result of {self._what} could not be copied out: {error}"))
        self._end()

    def fail(self, error: CollectiveError) -> None:
        with self._lock:
            if self._error is not None or self._over:
                return
            self._error = error
        self._end()

    def after(self, listener: Callable[[BarnraiseWork], None]) -> None:
        """Call when it has ended, at once if it has."""
        with self._lock:
            if not self._over:
                self._listeners.append(listener)
                return
        listener(self)

    @property
    def error(self) -> CollectiveError | None:
        return self._error

    def _end(self) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            if self._ended is not None:
                self._ended.set()
            base = self._base
            listeners, self._listeners = self._listeners, []
            self._finish = None
        if base is not None:
            completion_thread.settler.submit(lambda: base.set_result(None))
        for listener in listeners:
            listener(self)

    # torch's side

    def is_completed(self) -> bool:
        self.read(0.0)
        return self._over

    def is_success(self) -> bool:
        return self._over and self._error is None

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
        self.read(seconds)
        if not self._over and not self._event().wait(seconds):
            raise OperationTimeout(
                f"{self._what} has not ended within the {seconds:g} s that were waited; it goes on",
                hint="Wait again, or abort the group.",
            )
        if self._error is not None:
            raise self._error.with_traceback(None)  # it may be raised many times: keep only this way here
        return True

    def synchronize(self) -> None:
        self.wait()

    def read(self, seconds: float | None) -> None:
        """Where the reply comes to whoever waits, one of those who do reads it."""
        if self.read_reply is None or self._over or not self._reading.acquire(blocking=False):
            return
        try:
            self.read_reply(lambda: self._over, seconds)
        finally:
            self._reading.release()

    def _event(self) -> threading.Event:
        with self._lock:
            if self._ended is None:
                self._ended = threading.Event()
                if self._over:
                    self._ended.set()
            return self._ended

    def get_future(self) -> torch.futures.Future[Any]:
        if self.read_reply is not None and not self._over:
            completion_thread.settler.submit(lambda: self.read(None))
        with self._lock:
            if self._future is not None:
                return self._future
            base: torch.futures.Future[None] = torch.futures.Future()
            self._base, self._future = base, base.then(self._settle)
            future, over = self._future, self._over
        if over:
            base.set_result(None)  # nothing hangs on it yet, so this thread may do it
        return future

    def _settle(self, _: torch.futures.Future[None]) -> Result:
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result


def together(works: Sequence[BarnraiseWork], result: Result) -> BarnraiseWork:
    """Several works as one: it ends with the last of them, or with the first that fails."""
    whole = BarnraiseWork(result, max(1, len(works)), "a coalesced operation")
    if not works:
        whole.piece_done(time.monotonic_ns())

    def ended(work: BarnraiseWork) -> None:
        if work.error is not None:
            whole.fail(work.error)
        else:
            whole.piece_done(work.finished_at_ns or 0)

    for work in works:
        work.after(ended)
    if any(work.read_reply is not None for work in works):
        whole.read_reply = lambda _, seconds: _read_all(works, seconds)
    return whole


def _read_all(works: Sequence[BarnraiseWork], seconds: float | None) -> None:
    for work in works:
        work.read(seconds)
