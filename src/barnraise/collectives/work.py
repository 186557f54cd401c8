"""The c10d ``Work`` that a collective returns, for Python and for C++ callers.

C++ does not see an exception set on a torch future. It does see one raised in a ``then`` callback. The
future that callers get is always the result of such a callback, so DDP survives a failed operation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from barnraise.collectives import completion_thread
from barnraise.core.errors import CollectiveError, OperationTimeout

Result = list[torch.Tensor]

_CANCEL_S = 10.0  # for the reply of the communication process, whose own silence ends sooner


class BarnraiseWork(dist.Work):
    """One operation, made of one or more chunks. The reader thread completes it; any thread may query it."""

    def __init__(
        self, result: Result, chunks: int, what: str, finish: Callable[[], None] | None = None
    ) -> None:
        """Create the work of ``chunks`` chunks.

        ``finish`` runs after the last chunk, before the work is complete.
        """
        super().__init__()
        self._result = result
        self._chunks_left = chunks
        self._what = what
        self._finish = finish
        self._lock = threading.Lock()
        self._is_done = False
        self._done_event: threading.Event | None = None  # created only if a thread waits for another one
        self._error: CollectiveError | None = None
        self._complete_future: Callable[[], object] | None = None
        self._future: torch.futures.Future[Result] | None = None
        self._source = -1
        self._listeners: list[Callable[[BarnraiseWork], None]] = []
        self._reading = threading.Lock()
        self.cancel: Callable[[], None] | None = None  # times the operation out now
        self.read_reply: Callable[[Callable[[], bool], float | None], None] | None = None
        self.submitted_at_ns = time.monotonic_ns()
        self.finished_at_ns: int | None = None

    # the backend's side

    def complete_chunk(self, at_ns: int, source: int = -1) -> None:
        """Count a finished chunk. The last one completes the work."""
        with self._lock:
            self._chunks_left -= 1
            last = self._chunks_left == 0
            self.finished_at_ns = max(at_ns, self.finished_at_ns or 0)
            self._source = max(self._source, source)
        if not last:
            return
        if self._finish is not None and self._error is None:
            try:
                self._finish()
            except Exception as error:  # noqa: BLE001  # the work must complete on any device error
                self.fail(CollectiveError(f"the result of {self._what} could not be copied out: {error}"))
        self._mark_done()

    def fail(self, error: CollectiveError) -> None:
        """Complete the work with an error, unless it is complete."""
        with self._lock:
            if self._error is not None or self._is_done:
                return
            self._error = error
        self._mark_done()

    def add_listener(self, listener: Callable[[BarnraiseWork], None]) -> None:
        """Call ``listener`` when the work is complete, at once if it is."""
        with self._lock:
            if not self._is_done:
                self._listeners.append(listener)
                return
        listener(self)

    @property
    def error(self) -> CollectiveError | None:
        return self._error

    def _mark_done(self) -> None:
        with self._lock:
            if self._is_done:
                return
            self._is_done = True
            if self._done_event is not None:
                self._done_event.set()
            complete_future = self._complete_future
            listeners, self._listeners = self._listeners, []
            self._finish = self.cancel = None  # what they refer to may refer to this work
        if complete_future is not None:
            completion_thread.completion_threads.submit(complete_future)
        for listener in listeners:
            listener(self)

    # torch's side

    def is_completed(self) -> bool:
        self.poll_reply(0.0)
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done and self._error is None

    def exception(self) -> CollectiveError | None:
        return self._error

    def result(self) -> Result:
        return self._result

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the work is complete, and raise its error.

        At the timeout the operation is cancelled. A receive without a message ends alone. Any other operation
        ends the group, as at a timeout of its own.
        """
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        if not self._wait_until_done(seconds):
            cancel = self.cancel
            if cancel is not None:
                cancel()
            if not self._wait_until_done(0.0 if cancel is None else _CANCEL_S):
                raise OperationTimeout(
                    f"{self._what} is not complete after {seconds:g} s, and was not cancelled",
                    hint="Abort the group.",
                )
        if self._error is not None:
            raise self._error.with_traceback(None)  # it may be raised many times: drop the earlier tracebacks
        return True

    def _wait_until_done(self, seconds: float | None) -> bool:
        deadline = None if seconds is None else time.monotonic() + seconds
        self.poll_reply(seconds)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return self._is_done or self._event().wait(left)

    def synchronize(self) -> None:
        self.wait()

    def poll_reply(self, seconds: float | None) -> None:
        """Read the reply on this thread, if the operation uses the direct channel.

        If several threads wait, one of them reads.
        """
        if self.read_reply is None or self._is_done or not self._reading.acquire(blocking=False):
            return
        try:
            self.read_reply(lambda: self._is_done, seconds)
        finally:
            self._reading.release()

    def _event(self) -> threading.Event:
        with self._lock:
            if self._done_event is None:
                self._done_event = threading.Event()
                if self._is_done:
                    self._done_event.set()
            return self._done_event

    def get_future(self) -> torch.futures.Future[Any]:
        if self.read_reply is not None and not self._is_done:
            completion_thread.completion_threads.submit(lambda: self.poll_reply(None))
        with self._lock:
            if self._future is not None:
                return self._future
            base: torch.futures.Future[None] = torch.futures.Future()
            # Callbacks see the context of the caller, such as the rank that a thread is.
            self._complete_future = partial(copy_context().run, base.set_result, None)
            self._future = base.then(self._complete)
            future, over = self._future, self._is_done
        if over:
            base.set_result(None)  # it has no callback yet, so this thread may complete it
        return future

    def _complete(self, _: torch.futures.Future[None]) -> Result:
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result


def join_works(works: Sequence[BarnraiseWork], result: Result) -> BarnraiseWork:
    """Combine several works into one.

    It completes with the last of them, or fails with the first that fails.
    """
    joined = BarnraiseWork(result, max(1, len(works)), "a coalesced operation")
    if not works:
        joined.complete_chunk(time.monotonic_ns())

    def ended(work: BarnraiseWork) -> None:
        if work.error is not None:
            joined.fail(work.error)
        else:
            joined.complete_chunk(work.finished_at_ns or 0)

    for work in works:
        work.add_listener(ended)
    if works:
        joined.cancel = lambda: _cancel_all(works)
    if any(work.read_reply is not None for work in works):
        joined.read_reply = lambda _, seconds: _read_all(works, seconds)
    return joined


def _cancel_all(works: Sequence[BarnraiseWork]) -> None:
    for work in works:
        cancel = work.cancel
        if cancel is not None:
            cancel()


def _read_all(works: Sequence[BarnraiseWork], seconds: float | None) -> None:
    for work in works:
        work.poll_reply(seconds)
