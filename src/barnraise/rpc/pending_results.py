"""Results that this worker waits for: each comes, times out, or fails with its callee."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from barnraise.core.errors import BarnraiseError, OperationTimeout

_MAX_CHECK_S = 1.0
_HINT = "Give it a longer timeout_s, or see what that rank is doing. The function may still run there."


class PendingResult(NamedTuple):
    """A future of a call on another rank, and when it times out."""

    rank: int
    what: str
    timeout_s: float
    deadline: float
    future: Future[Any]

    def fail(self, error: BarnraiseError) -> None:
        """Complete the future with an error."""
        self.future.set_exception(error)


class PendingResults:
    """All pending results by number. Thread-safe; a result is completed by the thread that took it out.

    ``wake`` is called when a deadline comes before the next check.
    """

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._wake, self._clock = wake, clock
        self._condition = threading.Condition()
        self._pending: dict[int, PendingResult] = {}
        self._next_number = 0
        self._next_check = clock()

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, rank: int, what: str, timeout_s: float) -> tuple[int, Future[Any]]:
        """Return the number and the future of a new pending result."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # the function may run already: it cannot be cancelled
        deadline = self._clock() + timeout_s
        with self._condition:
            number, self._next_number = self._next_number, self._next_number + 1
            self._pending[number] = PendingResult(rank, what, timeout_s, deadline, future)
            is_early = deadline < self._next_check
        if is_early:
            self._wake()
        return number, future

    def take(self, number: int, rank: int) -> PendingResult | None:
        """Take a pending result of a rank out. Return None if there is none: it timed out, or never was."""
        with self._condition:
            pending = self._pending.get(number)
            if pending is None or pending.rank != rank:
                return None
            del self._pending[number]
            self._condition.notify_all()
        return pending

    def fail(self, number: int, rank: int, error: BarnraiseError) -> None:
        """Fail one result, if it is still pending."""
        pending = self.take(number, rank)
        if pending is not None:
            pending.fail(error)

    def fail_rank(self, rank: int, error: BarnraiseError) -> None:
        """Fail all results of a rank."""
        self._fail_where(lambda pending: pending.rank == rank, lambda _: error)

    def fail_all(self, error: BarnraiseError) -> None:
        """Fail all results that are pending."""
        self._fail_where(lambda _: True, lambda _: error)

    def expire(self) -> float:
        """Time out all results whose deadline has passed. Return the seconds until the next check."""
        now = self._clock()
        self._fail_where(lambda pending: pending.deadline <= now, _timeout_error)
        with self._condition:
            deadlines = [pending.deadline for pending in self._pending.values()]
            self._next_check = min([now + _MAX_CHECK_S, *deadlines])
            return max(0.0, self._next_check - now)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is pending. Return False at the timeout."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._pending, timeout_s)

    def _fail_where(
        self, fits: Callable[[PendingResult], bool], error: Callable[[PendingResult], BarnraiseError]
    ) -> None:
        with self._condition:
            chosen = {number: pending for number, pending in self._pending.items() if fits(pending)}
            for number in chosen:
                del self._pending[number]
            self._condition.notify_all()
        for pending in chosen.values():
            pending.fail(error(pending))


def _timeout_error(pending: PendingResult) -> OperationTimeout:
    return OperationTimeout(
        f"{pending.what} on rank {pending.rank} did not answer within {pending.timeout_s:g} s",
        late=(pending.rank,),
        hint=_HINT,
    )
