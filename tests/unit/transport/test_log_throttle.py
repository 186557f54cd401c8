"""Log throttle for failures of unknown peers."""

from __future__ import annotations

import logging

import pytest

from barnraise.transport.log_throttle import LOG_PERIOD_S, ThrottledLog


def test_lines_are_bounded_and_return_after_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    """Tries to fill the log once, so that later failures would never be logged."""
    clock = [0.0]
    log = ThrottledLog(logging.getLogger("test"), "no pairing with", now=lambda: clock[0])
    with caplog.at_level(logging.WARNING):
        for number in range(200):
            log.about(f"10.0.{number}.1:5", "wrong code")
            log.about(f"10.0.{number}.1:6", "wrong code")
        assert len(caplog.records) == 64
        clock[0] = LOG_PERIOD_S
        log.about("10.1.0.1:5", "wrong code")
    assert len(caplog.records) == 65
