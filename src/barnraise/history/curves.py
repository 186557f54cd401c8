"""Curves of logged values: raw, smoothed, and thinned to what a display can show. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from barnraise.history.columns import unpack_column
from barnraise.history.entries import ValueBatch
from barnraise.history.logs.spans import steps_per_row
from barnraise.history.step_table import common_start
from barnraise.history.view import CurvePoint, CurveView

MOST_POINTS = 1000
_SMOOTHED_PART = 0.02  # of the curve: the time constant of the moving average

_Raw = tuple[int, float, float, float, int]  # step, mean, low, high, stride


def build_curves(batches: Iterable[ValueBatch], most_points: int = MOST_POINTS) -> tuple[CurveView, ...]:
    """Return the curve of each name; a curve has at most ``most_points`` points."""
    table = CurveTable(most_points)
    table.update(list(batches))
    return table.curves()


class CurveTable:
    """Logged values of a merged history by name. An update costs what has changed since the last one."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most_points = most_points
        self._batches: list[ValueBatch] = []
        self._columns: dict[str, _CurveColumns] = {}

    def update(self, batches: Sequence[ValueBatch]) -> None:
        """Take the values of a history in place of those before; equal first batches are not read again."""
        same = common_start(self._batches, batches)
        for columns in self._columns.values():
            columns.truncate(same)
        self._columns = {name: columns for name, columns in self._columns.items() if columns.steps}
        self._batches[same:] = batches[same:]
        for place, batch in enumerate(batches[same:], same):
            for index, name in enumerate(batch.names[: len(batch.columns)]):
                self._columns.setdefault(name, _CurveColumns()).add(place, batch, index)

    def curves(self) -> tuple[CurveView, ...]:
        """Return the curve of each name that has values."""
        return tuple(
            columns.curve(name, self._most_points) for name, columns in self._columns.items() if columns.steps
        )


class _Mark(NamedTuple):
    """Rows up to the end of a batch, and the newest and the lowest finite value in them."""

    batch: int
    rows: int
    newest: float | None
    lowest: float | None


_NO_ROWS = _Mark(-1, 0, None, None)


class _CurveColumns:
    """Rows of one name."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._means: list[float] = []
        self._lows: list[float] = []
        self._highs: list[float] = []
        self._strides: list[int] = []
        self._weights: list[int] = []  # steps of each row, without those that it lacks
        self._marks: list[_Mark] = []
        self._thinned: list[_Raw] = []
        self._width = 1  # rows of a point
        self._unchanged = 0  # rows since the points were made

    def truncate(self, batches: int) -> None:
        """Drop the rows of all batches from this one on."""
        while self._marks and self._marks[-1].batch >= batches:
            self._marks.pop()
        rows = self._marks[-1].rows if self._marks else 0
        for column in (self.steps, self._means, self._lows, self._highs, self._strides, self._weights):
            del column[rows:]
        self._unchanged = min(self._unchanged, rows)

    def add(self, place: int, batch: ValueBatch, index: int) -> None:
        """Add the rows of a batch that have a value."""
        means = unpack_column(batch.columns[index])
        lows = unpack_column(batch.lows[index]) if index < len(batch.lows) else means
        highs = unpack_column(batch.highs[index]) if index < len(batch.highs) else means
        before = self._marks[-1] if self._marks else _NO_ROWS
        newest, lowest, weight = before.newest, before.lowest, steps_per_row(batch)
        for row, (mean, low, high) in enumerate(zip(means, lows, highs, strict=False)):
            if math.isnan(mean) and math.isnan(low):
                continue
            self.steps.append(batch.first + row * batch.stride)
            self._means.append(mean)
            self._lows.append(low)
            self._highs.append(high)
            self._strides.append(batch.stride)
            self._weights.append(weight)
            newest = mean if math.isfinite(mean) else newest
            lowest = low if math.isfinite(low) and (lowest is None or low < lowest) else lowest
        self._marks.append(_Mark(place, len(self.steps), newest, lowest))

    def curve(self, name: str, most_points: int) -> CurveView:
        """Return the curve of all rows."""
        self._thin(most_points)
        mark = self._marks[-1]
        return CurveView(name=name, points=_smoothed(self._thinned), newest=mark.newest, lowest=mark.lowest)

    def _thin(self, most_points: int) -> None:
        """Make points of equal numbers of rows; lows and highs keep every spike."""
        width = max(1, math.ceil(len(self.steps) / most_points))
        whole = self._unchanged // width if width == self._width else 0
        del self._thinned[whole:]
        if width == 1:
            rows = (self.steps, self._means, self._lows, self._highs, self._strides)
            self._thinned.extend(zip(*(column[whole:] for column in rows), strict=True))
        else:
            starts = range(whole * width, len(self.steps), width)
            self._thinned.extend(self._point(start, start + width) for start in starts)
        self._width, self._unchanged = width, len(self.steps)

    def _point(self, start: int, end: int) -> _Raw:
        rows = slice(start, end)
        mean = sum(map(operator.mul, self._means[rows], self._weights[rows])) / sum(self._weights[rows])
        last = min(end, len(self.steps)) - 1
        span = self.steps[last] + self._strides[last] - self.steps[start]
        return self.steps[start], mean, min(self._lows[rows]), max(self._highs[rows]), span


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
