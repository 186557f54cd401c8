"""Curves of logged values: raw, smoothed, and thinned to what a display can show. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from barnraise.history.columns import unpack_column
from barnraise.history.entries import ValueBatch
from barnraise.history.view import CurvePoint, CurveView

MOST_POINTS = 1000
_SMOOTHED_PART = 0.02  # of the curve: the time constant of the moving average

_Raw = tuple[int, float, float, float, int]  # step, mean, low, high, stride


def build_curves(batches: Iterable[ValueBatch], most_points: int = MOST_POINTS) -> tuple[CurveView, ...]:
    """Return the curve of each name; a curve has at most ``most_points`` points."""
    raw: dict[str, list[_Raw]] = {}
    for batch in batches:
        for index, name in enumerate(batch.names[: len(batch.columns)]):
            raw.setdefault(name, []).extend(_rows(batch, index))
    return tuple(_curve(name, points, most_points) for name, points in raw.items() if points)


def _rows(batch: ValueBatch, index: int) -> Iterable[_Raw]:
    means = unpack_column(batch.columns[index])
    lows = unpack_column(batch.lows[index]) if index < len(batch.lows) else means
    highs = unpack_column(batch.highs[index]) if index < len(batch.highs) else means
    for row, (mean, low, high) in enumerate(zip(means, lows, highs, strict=False)):
        if not (math.isnan(mean) and math.isnan(low)):
            yield batch.first + row * batch.stride, mean, low, high, batch.stride


def _curve(name: str, raw: Sequence[_Raw], most_points: int) -> CurveView:
    finite = [mean for _, mean, *_ in raw if math.isfinite(mean)]
    return CurveView(
        name=name,
        points=_smoothed(_thinned(raw, most_points)),
        newest=finite[-1] if finite else None,
        lowest=min((low for _, _, low, _, _ in raw if math.isfinite(low)), default=None),
    )


def _thinned(raw: Sequence[_Raw], most_points: int) -> list[_Raw]:
    """Return means of equal numbers of rows; lows and highs keep every spike."""
    group = max(1, math.ceil(len(raw) / most_points))
    if group == 1:
        return list(raw)
    thinned = []
    for start in range(0, len(raw), group):
        rows = raw[start : start + group]
        weight = sum(row[4] for row in rows)
        mean = sum(row[1] * row[4] for row in rows) / weight
        span = rows[-1][0] + rows[-1][4] - rows[0][0]
        thinned.append((rows[0][0], mean, min(row[2] for row in rows), max(row[3] for row in rows), span))
    return thinned


def _smoothed(rows: Sequence[_Raw]) -> tuple[CurvePoint, ...]:
    """Add an exponential mean of both directions, which does not lag; it ignores what is not finite."""
    keep = 1 - 1 / max(2.0, _SMOOTHED_PART * len(rows))
    values = [row[1] for row in rows]
    before = _running_sums(values, keep)
    after = _running_sums(values[::-1], keep)[::-1]
    points = []
    for (step, mean, low, high, stride), (left, own), (right, other) in zip(rows, before, after, strict=True):
        itself = (mean, 1.0) if math.isfinite(mean) else (0.0, 0.0)  # it is in both sums
        total, weight = left + right - itself[0], own + other - itself[1]
        smooth = total / weight if weight > 0 else mean
        points.append(CurvePoint(step, mean, smooth, low, high, stride))
    return tuple(points)


def _running_sums(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """Return for each value the weighted sum of those up to it, and of their weights."""
    total = weight = 0.0
    sums = []
    for value in values:
        is_known = math.isfinite(value)
        total, weight = keep * total + (value if is_known else 0.0), keep * weight + is_known
        sums.append((total, weight))
    return sums
