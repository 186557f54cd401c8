"""Waits that double or follow a table."""

from __future__ import annotations

from barnraise.core.flow.backoff import Backoff, BackoffTimer, SteppedBackoff


def test_backoff_waits_double_up_to_max() -> None:
    backoff = Backoff(5.0, 60.0)
    assert [backoff.wait(attempt) for attempt in range(6)] == [5, 10, 20, 40, 60, 60]
    assert backoff.wait(10**6) == 60


def test_backoff_jitter_draws_from_rest_of_wait() -> None:
    backoff = Backoff(4.0, 60.0, jitter=0.5)
    assert backoff.wait(1, lambda low, high: low) == 4.0
    assert backoff.wait(1, lambda low, high: high) == 8.0
    assert 2.0 <= backoff.wait(0) <= 4.0


def test_stepped_backoff_repeats_last_wait() -> None:
    backoff = SteppedBackoff((0.0, 1.0, 5.0))
    assert [backoff.wait(attempt) for attempt in range(5)] == [0.0, 1.0, 5.0, 5.0, 5.0]


def test_backoff_timer_counts_failures_until_reset() -> None:
    timer = BackoffTimer(Backoff(1.0, 3.0))
    assert [timer.next_wait() for _ in range(3)] == [1.0, 2.0, 3.0]
    timer.reset()
    assert timer.next_wait() == 1.0
