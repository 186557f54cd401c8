"""Picture of a curve in letters: dots for the values, a line for their average, and marks of events. Pure.

A cell of Braille letters has two by four dots. A cell that the line crosses shows no values, so that both
differ without colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from barnraise.cli.runs.progress.progress_line import format_value
from barnraise.cli.watch.lines import Line, Span, line
from barnraise.history.view import CurveMark, CurvePoint, CurveView, EventKind

_FIRST_LETTER = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column and row of a cell
_LABEL = 8
_OUTLIERS = 0.02  # of the values at each end do not stretch the axis
_SIGNS: dict[EventKind, str] = {
    "plan": "*",
    "joined": "+",
    "resumed": "+",
    "recovered": "+",
    "paused": "=",
    "left": "-",
    "evicted": "-",
    "died": "-",
    "rollback": "<",
}
_IMPORTANCE = "*=+-<"  # the last of several events in one column is shown
_WORDS = {"+": "came", "-": "went", "=": "paused", "*": "new plan", "<": "went back"}


def legend(marks: Iterable[CurveMark]) -> str:
    """Return what the signs on the curve mean; only those that there are."""
    signs = {_SIGNS[mark.kind] for mark in marks if mark.kind in _SIGNS and mark.step > 0}
    parts = ["dots: values, line: average", *(f"{sign} {_WORDS[sign]}" for sign in _WORDS if sign in signs)]
    return "  ".join(parts)


class _Canvas:
    """Dots of a picture, counted from the top left."""

    def __init__(self, width: int, height: int) -> None:
        self.columns, self.rows = 2 * width, 4 * height
        self.cells: dict[tuple[int, int], int] = {}

    def add(self, x: int, y: int) -> None:
        if 0 <= x < self.columns and 0 <= y < self.rows:
            cell = (x // 2, y // 4)
            self.cells[cell] = self.cells.get(cell, 0) | _DOTS[x % 2][y % 4]


def draw_curve(curve: CurveView, marks: Iterable[CurveMark], width: int, height: int) -> list[Line]:
    """Return the curve with its axes, a row of marks and a row of steps: ``height + 2`` lines."""
    points = [point for point in curve.points if math.isfinite(point.smooth)]
    if not points:
        return [line("no finite value yet", "faint")]
    room = width - _LABEL - 1
    first, last = points[0].step, points[-1].step + points[-1].stride
    low, high = _bounds(points)
    values, average = _Canvas(room, height), _Canvas(room, height)

    def x(step: float) -> int:
        return round((step - first) / max(1, last - first) * (2 * room - 1))

    def y(value: float) -> int:
        return round((high - value) / (high - low) * (4 * height - 1))

    for point in points:
        for value in {point.low, point.high, point.value}:
            if math.isfinite(value):
                values.add(x(point.step), y(value))
    for before, after in pairwise(points):
        _connect(average, (x(before.step), y(before.smooth)), (x(after.step), y(after.smooth)))
    average.add(x(points[-1].step), y(points[-1].smooth))
    placed = _placed_marks(marks, lambda step: x(step) // 2, first, last)
    rows = [
        (Span(_label(row, height, low, high), "faint"), *_row(values, average, placed, row, room))
        for row in range(height)
    ]
    signs = "".join(placed.get(column, " ") for column in range(room))
    rows.append((Span(" " * (_LABEL + 1)), Span(signs, "strong")))
    start, end = f"{first:,}", f"{last:,}"
    steps = start + end.rjust(max(1, room - len(start)))
    rows.append((Span(" " * (_LABEL + 1)), Span(steps, "faint")))
    return rows


def _bounds(points: Sequence[CurvePoint]) -> tuple[float, float]:
    """Return the ends of the axis: all of the average, and the values without a few outliers."""
    values = sorted(point.value for point in points if math.isfinite(point.value))
    skipped = int(len(values) * _OUTLIERS)
    kept = values[skipped : len(values) - skipped] or values
    averages = [point.smooth for point in points]
    low, high = min(*averages, *kept), max(*averages, *kept)
    if high - low < 1e-12 * max(1.0, abs(high)):
        spread = abs(high) * 0.1 or 1.0
        return low - spread, high + spread
    return low, high


def _connect(canvas: _Canvas, start: tuple[int, int], end: tuple[int, int]) -> None:
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for place in range(count + 1):
        part = place / count
        canvas.add(round(start[0] + (end[0] - start[0]) * part), round(start[1] + (end[1] - start[1]) * part))


def _placed_marks(
    marks: Iterable[CurveMark], column_of: Callable[[float], int], first: int, last: int
) -> dict[int, str]:
    placed: dict[int, str] = {}
    for mark in marks:
        sign = _SIGNS.get(mark.kind, "")
        if sign and first < mark.step <= last:
            column = column_of(mark.step)
            placed[column] = max(placed.get(column, "*"), sign, key=_IMPORTANCE.index)
    return placed


def _row(values: _Canvas, average: _Canvas, placed: dict[int, str], row: int, width: int) -> list[Span]:
    spans: list[Span] = []
    for column in range(width):
        cell = (column, row)
        if cell in average.cells:
            span = Span(chr(_FIRST_LETTER + average.cells[cell]), "curve")
        elif cell in values.cells:
            span = Span(chr(_FIRST_LETTER + values.cells[cell]), "faint")
        else:
            span = Span("┊" if column in placed else " ", "faint")
        if spans and spans[-1].style == span.style:
            spans[-1] = Span(spans[-1].text + span.text, span.style)
        else:
            spans.append(span)
    return spans


def _label(row: int, height: int, low: float, high: float) -> str:
    if row == 0:
        text = format_value(high)
    elif row == height - 1:
        text = format_value(low)
    else:
        return " " * _LABEL + "│"
    return text.rjust(_LABEL)[:_LABEL] + "┤"
