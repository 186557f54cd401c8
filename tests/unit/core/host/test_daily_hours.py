"""Hours of the day: inside or outside, and how long."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ConfigError
from barnraise.core.host.daily_hours import DailyHours

SETTING = "contributing.quiet_hours"
NIGHT = DailyHours.parse("22:30-07:00", SETTING)
NOON = DailyHours.parse("12:00-13:00", SETTING)


@pytest.mark.parametrize(
    ("hours", "now", "left_s"),
    [
        (NIGHT, "22:29", 0.0),
        (NIGHT, "22:30", 8.5 * 3600),
        (NIGHT, "00:00", 7 * 3600),
        (NIGHT, "06:59", 60.0),
        (NIGHT, "07:00", 0.0),
        (NOON, "12:30", 1800.0),
        (NOON, "13:00", 0.0),
    ],
)
def test_hours_end_at_given_time(hours: DailyHours, now: str, left_s: float) -> None:
    assert hours.left_s(datetime.fromisoformat(f"2026-03-01T{now}")) == left_s


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439))
def test_hours_are_over_after_left_s(begin: int, end: int, now: int) -> None:
    if begin == end:
        return
    text = f"{begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"
    hours = DailyHours.parse(text, SETTING)
    assert hours is not None
    moment = datetime(2026, 5, 5) + timedelta(minutes=now)
    left = hours.left_s(moment)
    assert hours.left_s(moment + timedelta(seconds=left)) == 0.0
    assert 0 <= left <= 86_400


@pytest.mark.parametrize("text", ["22-7", "24:00-07:00", "22:30", "07:00-07:00", "22:30 - 07:00"])
def test_hours_with_invalid_span_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=SETTING):
        DailyHours.parse(text, SETTING)
