"""Scales of charts: places of values, round ticks, and short numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from barnraise.history.sentences import duration

_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_PREFIXED = 1e4  # from here on
_OUTLIERS = 0.01  # part of the values, at each end, that may lie outside of the chart
_FAR = 3.0  # how much longer the range is with outliers that are left out


@dataclass(frozen=True)
class Scale:
    """Linear scale from values to places on the screen; what is outside goes to the nearer end."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return the place of a finite value."""
        span = self.high - self.low
        part = (value - self.low) / span if span > 0 else 0.5
        return self.start + min(1.0, max(0.0, part)) * (self.end - self.start)


def value_range(values: Iterable[float]) -> tuple[float, float] | None:
    """Return the range of the finite values with a margin, without far outliers; None if there is none."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return None
    cut = int(len(finite) * _OUTLIERS)
    low, high = finite[cut], finite[-1 - cut]
    if finite[-1] - finite[0] <= _FAR * (high - low):
        low, high = finite[0], finite[-1]
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return max(low - margin, -1e300), min(high + margin, 1e300)


def round_ticks(low: float, high: float, count: int) -> tuple[float, ...]:
    """Return about ``count`` round numbers of a range: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return (low,)
    rough = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return _multiples(low, high, step)


def time_ticks(span_s: float, count: int) -> tuple[float, ...]:
    """Return about ``count`` round times from 0 to ``span_s``."""
    rough = span_s / max(1, count)
    days = 86400 * math.ceil(rough / 86400)
    return _multiples(0.0, span_s, next((step for step in _TIME_STEPS if step >= rough), days))


def _multiples(low: float, high: float, step: float) -> tuple[float, ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1)) or (low,)


def short_number(value: float | None, digits: int = 3) -> str:
    """Return a number as a person reads it: ``1,200``, ``0.0031``, ``45k``; what is unknown is a dash."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    size = abs(value)
    for factor, sign in _PREFIXES:
        if size >= max(factor, _PREFIXED):
            return f"{value / factor:.{digits}g}{sign}" if size < 1000 * factor else f"{value:.{digits}g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def short_seconds(seconds: float | None) -> str:
    """Return a time as a person reads it: ``3 ms``, ``1.42 s``, ``2 h 5 min``."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if 0 < seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)
