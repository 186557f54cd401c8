"""Times at which a long wait is reported."""

from __future__ import annotations

from barnraise.core.flow.wait_reporter import WaitReporter


def _reports(reporter: WaitReporter, clock: list[float], until: int) -> list[int]:
    times = []
    for now in range(until):
        clock[0] = float(now)
        if reporter.is_due():
            times.append(now)
    return times


def test_wait_reporter_reports_after_first_then_every_interval() -> None:
    clock = [0.0]
    reporter = WaitReporter(10.0, 60.0, clock=lambda: clock[0])
    assert _reports(reporter, clock, 140) == [10, 70, 130]
    assert reporter.waited_s == 139.0


def test_wait_reporter_with_max_interval_doubles_it() -> None:
    clock = [0.0]
    reporter = WaitReporter(10.0, 20.0, max_interval_s=60.0, clock=lambda: clock[0])
    assert _reports(reporter, clock, 260) == [10, 30, 70, 130, 190, 250]
