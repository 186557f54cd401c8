"""Each pending result ends once: by its answer, its deadline or the loss of its callee."""

from __future__ import annotations

import threading

from barnraise.core.errors import OperationTimeout, PeerLost
from barnraise.rpc.pending_results import PendingResults


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wakes = 0

    def __call__(self) -> float:
        return self.now

    def wake(self) -> None:
        self.wakes += 1


def pending_results() -> tuple[PendingResults, Clock]:
    clock = Clock()
    return PendingResults(clock.wake, clock), clock


def test_result_is_taken_once_and_by_its_callee_only() -> None:
    results, _ = pending_results()
    number, future = results.begin(1, "f", 5.0)
    assert results.take(number, 2) is None
    assert results.take(number + 1, 1) is None
    pending = results.take(number, 1)
    assert pending is not None
    assert (pending.future, pending.what) == (future, "f")
    assert results.take(number, 1) is None
    assert len(results) == 0
    assert not future.cancel(), "a call that was sent cannot be cancelled"


def test_result_times_out_at_its_deadline() -> None:
    results, clock = pending_results()
    _, early = results.begin(1, "f", 5.0)
    _, late = results.begin(2, "g", 7.5)
    clock.now += 4.9
    assert round(results.expire(), 6) == 0.1, "the next check is at the first deadline"
    assert not early.done()
    clock.now += 0.1
    assert results.expire() == 1.0, "at least once in a second"
    error = early.exception()
    assert isinstance(error, OperationTimeout)
    assert error.late == (1,)
    assert "f on rank 1 did not answer within 5 s" in error.message
    assert not late.done()


def test_early_deadline_wakes_the_clock_thread() -> None:
    results, clock = pending_results()
    results.expire()
    results.begin(1, "f", 5.0)
    assert clock.wakes == 0, "the next check comes before that"
    results.begin(1, "f", 0.5)
    assert clock.wakes == 1


def test_loss_of_a_rank_fails_its_results_only() -> None:
    results, _ = pending_results()
    _, lost = results.begin(1, "f", 5.0)
    _, kept = results.begin(2, "f", 5.0)
    results.fail_rank(1, PeerLost(1, "it was killed"))
    assert isinstance(lost.exception(), PeerLost)
    assert not kept.done()
    results.fail_all(PeerLost(2, "all"))
    assert isinstance(kept.exception(), PeerLost)


def test_wait_ends_with_the_last_result() -> None:
    results, _ = pending_results()
    number, _ = results.begin(1, "f", 5.0)
    assert not results.wait_empty(0.05)
    taker = threading.Timer(0.1, lambda: results.take(number, 1))
    taker.start()
    assert results.wait_empty(30.0)
    taker.join()
