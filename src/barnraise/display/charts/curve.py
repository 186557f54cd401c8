"""Curves of logged values over the steps, raw and smoothed, with marks of what changed. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from barnraise.display.charts.elements import Element, element, svg
from barnraise.display.charts.marks import ROW, ROWS, draw_marks
from barnraise.display.charts.plot import Plot, horizontal_axis, lines, text, vertical_axis
from barnraise.display.charts.scale import Scale, round_ticks, short_number, value_range
from barnraise.history.sentences import counted
from barnraise.history.view import CurveMark, CurvePoint, CurveView, RatePoint

_LEFT, _RIGHT, _BOTTOM = 52, 14, 24


def draw_curve(
    curve: CurveView, marks: Sequence[CurveMark] = (), *, width: float = 720, height: float = 280
) -> Element:
    """Return a curve: the range of values as a band, raw values thin, the smoothed ones thick."""
    label = f"{curve.name} over {counted(_end(curve.points), 'step')}; newest {short_number(curve.newest)}"
    ends = value_range(value for point in curve.points for value in (point.low, point.high, point.smooth))
    top = ROW * ROWS + 14 if marks else 10
    if ends is None or not curve.points:
        return svg(width, 40, label, text(8, 24, "no finite value was logged", "br-quiet"))
    plot = _plot(width, height, top, (curve.points[0].step, _end(curve.points)), ends)
    return svg(
        width,
        height,
        label,
        *_axes(plot),
        *_bands(plot, curve.points),
        *lines(plot, ((point.step, point.value) for point in curve.points), "br-raw"),
        *lines(plot, ((point.step, point.smooth) for point in curve.points), "br-smooth"),
        *_infinite(plot, curve.points),
        *draw_marks(plot, marks, 0),
    )


def draw_rates(
    rates: Sequence[RatePoint],
    marks: Sequence[CurveMark] = (),
    *,
    end: int,
    width: float = 720,
    height: float = 200,
) -> Element:
    """Return the samples per second over the steps; steps per second if samples are not counted."""
    has_samples = any(rate.samples_per_s > 0 for rate in rates)
    values = [rate.samples_per_s if has_samples else rate.steps_per_s for rate in rates]
    unit = "samples/s" if has_samples else "steps/s"
    ends = value_range(values)
    if ends is None:
        return svg(width, 40, f"{unit} over the steps", text(8, 24, "no step was timed", "br-quiet"))
    top = ROW * ROWS + 14 if marks else 10
    plot = _plot(width, height, top, (rates[0].step, end), (0.0, ends[1]))
    steps = (rate.step for rate in rates)
    return svg(
        width,
        height,
        f"{unit} over {counted(end, 'step')}",
        *_axes(plot),
        *lines(plot, zip(steps, values, strict=True), "br-rate"),
        *draw_marks(plot, marks, 0),
    )


def _plot(
    width: float, height: float, top: float, steps: tuple[int, int], values: tuple[float, float]
) -> Plot:
    return Plot(
        Scale(*steps, _LEFT, width - _RIGHT),
        Scale(*values, height - _BOTTOM, top),
    )


def _axes(plot: Plot) -> Iterator[Element]:
    ticks = round_ticks(plot.y.low, plot.y.high, 4)
    yield from vertical_axis(plot, [(tick, short_number(tick)) for tick in ticks])
    steps = round_ticks(plot.x.low, plot.x.high, 4 if plot.is_narrow else 8)
    labels = [(step, short_number(step, 6)) for step in steps if step == int(step)]
    yield from horizontal_axis(plot, labels)


def _bands(plot: Plot, points: Sequence[CurvePoint]) -> Iterator[Element]:
    """Yield the range of values where a point stands for several steps."""
    part: list[CurvePoint] = []
    for point in [*points, None]:
        if point is not None and math.isfinite(point.low) and math.isfinite(point.high):
            part.append(point)
            continue
        if len(part) > 1 and any(each.low < each.high for each in part):
            upper = [plot.point(each.step, each.high) for each in part]
            lower = [plot.point(each.step, each.low) for each in reversed(part)]
            yield element("polygon", points=" ".join(upper + lower), class_="br-band")
        part = []


def _infinite(plot: Plot, points: Sequence[CurvePoint]) -> Iterator[Element]:
    """Yield a cross at the top for each place where the value is not a finite number."""
    places = sorted({round(plot.x.place(point.step)) for point in points if not math.isfinite(point.value)})
    top = plot.y.end + 5
    for place in places:
        cross = f"M{place - 3},{top - 3} l6,6 m0,-6 l-6,6"
        yield element("path", element("title", "not a finite number"), d=cross, class_="br-axis")


def _end(points: Sequence[CurvePoint]) -> int:
    return points[-1].step + points[-1].stride if points else 0
