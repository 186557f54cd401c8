"""The pool runs a limited number of calls at once, and bounds what waits."""

from __future__ import annotations

import threading

import pytest

from barnraise.rpc.call_pool import CallPool

PATIENCE_S = 30.0


def occupied(pool: CallPool, nbytes: int = 0) -> threading.Event:
    """Occupy a thread of the pool until the event that is returned is set."""
    begun, goes_on = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        goes_on.wait(PATIENCE_S)

    assert pool.submit(nbytes, job) is None
    assert begun.wait(PATIENCE_S)
    return goes_on


def test_jobs_run_in_order_on_limited_threads() -> None:
    pool, ran = CallPool(2), []
    first, second = occupied(pool), occupied(pool)
    for number in range(50):
        assert pool.submit(0, lambda number=number: ran.append(number)) is None
    assert ran == []
    first.set()
    pool.wait_idle(0.5)
    assert ran == list(range(50))
    second.set()
    pool.wait_idle(PATIENCE_S)


def test_bytes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.rpc.call_pool.MAX_WAITING_BYTES", 100)
    pool = CallPool(1)
    goes_on = occupied(pool, 1000)
    assert pool.submit(200, lambda: None) is None, "one always fits"
    assert pool.submit(1, lambda: None) == "calls with 200 bytes wait there"
    goes_on.set()
    pool.wait_idle(PATIENCE_S)
    assert pool.submit(1, lambda: None) is None


def test_number_of_jobs_that_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.rpc.call_pool.MAX_WAITING", 1)
    pool = CallPool(1)
    goes_on = occupied(pool)
    assert pool.submit(0, lambda: None) is None
    assert pool.submit(0, lambda: None) == "1 calls wait there"
    goes_on.set()
    pool.wait_idle(PATIENCE_S)


def test_job_that_raises_costs_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    pool, ran = CallPool(1), []

    def fail() -> None:
        raise ZeroDivisionError

    for _ in range(3):
        pool.submit(0, fail)
    pool.submit(0, lambda: ran.append(1))
    pool.wait_idle(PATIENCE_S)
    assert ran == [1]
    assert "could not be answered" in caplog.text


def test_cleared_jobs_are_not_run() -> None:
    pool, ran = CallPool(1), []
    goes_on = occupied(pool)
    pool.submit(10, lambda: ran.append(1))
    pool.clear()
    goes_on.set()
    pool.wait_idle(PATIENCE_S)
    assert ran == []
