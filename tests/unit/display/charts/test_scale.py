"""Scales, ticks and short numbers."""

from __future__ import annotations

import math

import pytest

from barnraise.display.charts.scale import (
    Scale,
    round_ticks,
    short_number,
    short_seconds,
    time_ticks,
    value_range,
)


def test_scale_places_values_and_holds_outliers_at_its_ends() -> None:
    scale = Scale(0, 10, 100, 200)
    assert [scale.place(value) for value in (0, 5, 10, -7, 99)] == [100, 150, 200, 100, 200]
    assert Scale(3, 3, 0, 10).place(3) == 5


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, (0, 2, 4, 6, 8, 10)), (0.2, 4.4, (1, 2, 3, 4)), (5, 5, (5,)), (math.nan, 1, None)],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: tuple[float, ...] | None) -> None:
    made = round_ticks(low, high, 5)
    assert len(made) == 1 if ticks is None else made == pytest.approx(ticks)


@pytest.mark.parametrize("span", [1e-30, 3.7e-5, 1.0, 999.0, 1e12, 1e300])
def test_number_of_ticks_stays_near_the_wish(span: float) -> None:
    assert 2 <= len(round_ticks(-span / 3, span, 6)) <= 7


@pytest.mark.parametrize("span", [0.5, 61, 3_600, 86_400 * 3, 1e9])
def test_times_are_few_and_begin_at_zero(span: float) -> None:
    ticks = time_ticks(span, 6)
    assert ticks[0] == 0
    assert 1 <= len(ticks) <= 8


def test_range_ignores_outliers_and_what_is_not_finite() -> None:
    values = [math.nan, math.inf, *([1.0] * 150), *([2.0] * 150), 1e30]
    assert value_range(values) == pytest.approx((0.95, 2.05))
    assert value_range([math.nan]) is None
    falling = [4.9 - 0.02 * step for step in range(100)] + [3.0] * 300
    assert (value_range(falling) or (0, 0))[1] > 4.9, "the start of a curve is no outlier"
    low, high = value_range([7.0]) or (0, 0)
    assert low < 7 < high


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "NaN"),
        (-math.inf, "-∞"),
        (0.00312, "0.00312"),
        (1234.4, "1,234"),
        (45_100, "45.1k"),
        (1.2e9, "1.2G"),
        (1e20, "1e+20"),
    ],
)
def test_short_number_is_readable(value: float | None, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0.0021, "2.1 ms"), (1.417, "1.42 s"), (200, "3 min 20 s")]
)
def test_short_time_has_a_unit(seconds: float | None, text: str) -> None:
    assert short_seconds(seconds) == text
