"""Waits of a retry loop, and their reports."""

from __future__ import annotations

import re

from barnraise.core.flow.retry import ReportedBackoff


def test_reported_backoff_sleeps_longer_each_time_and_reports() -> None:
    now, slept, messages = [0.0], list[float](), list[str]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    waiting = ReportedBackoff("the hub", messages.append, sleep, lambda: now[0])
    for _ in range(8):
        waiting.pause("it is \x1b[2Jasleep")
    assert all(
        low <= wait <= 2 * low for wait, low in zip(slept, (0.25, 0.5, 1, 2, 4, 8, 10, 10), strict=True)
    )
    assert messages
    reported = re.match(r"waiting for (\d+) s for the hub", messages[0])
    assert reported is not None
    # The first pause that ends after ten seconds began before them, and lasted 16 s at most.
    assert 10 <= int(reported[1]) <= 26
    assert messages[0].endswith(" s for the hub: it is ?[2Jasleep")


def test_reported_backoff_sleeps_at_least_min() -> None:
    slept: list[float] = []
    ReportedBackoff("the hub", lambda text: None, slept.append, lambda: 0.0).pause("busy", 30.0)
    assert slept == [30.0]
