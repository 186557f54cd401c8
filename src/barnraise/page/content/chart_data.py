"""Data of the curves for the chart in the browser: columns, as the chart library reads them. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from barnraise.core.sanitize import printable
from barnraise.history.view import CurveView, RunView

MOST_CURVES = 12
MOST_MARKS = 100
_DIGITS = 6
_NAME = 64


def chart_data(view: RunView) -> str:
    """Return the curves and marks of a run as JSON; the curve that counts comes first."""
    curves = sorted(view.curves, key=lambda curve: curve.name != view.metric)[:MOST_CURVES]
    data = {
        "counts": view.counts,
        "curves": [_columns(curve) for curve in curves],
        "marks": [
            {"step": mark.step, "kind": mark.kind, "text": printable(mark.text, limit=300)}
            for mark in view.marks[-MOST_MARKS:]
        ],
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def comparison_data(views: Sequence[RunView], name: str) -> str:
    """Return the smoothed curves of a logged value of several runs as JSON."""
    curves = [(view.run, view.curve(name)) for view in views]
    runs = [
        {"name": printable(run), "steps": [p.step for p in curve.points], "smooth": _values(curve, "smooth")}
        for run, curve in curves
        if curve is not None
    ]
    return json.dumps({"runs": runs}, separators=(",", ":"), allow_nan=False)


def common_metric(views: Sequence[RunView]) -> str:
    """Return the value whose curves are compared: the one that counts in the first run that has one."""
    return next((view.metric for view in views if view.metric), "")


def _columns(curve: CurveView) -> dict[str, Any]:
    return {
        "name": printable(curve.name, limit=_NAME),
        "steps": [point.step for point in curve.points],
        "values": _values(curve, "value"),
        "smooth": _values(curve, "smooth"),
    }


def _values(curve: CurveView, column: str) -> list[float | None]:
    """Return rounded values; what is not finite becomes a gap."""
    return [_rounded(getattr(point, column)) for point in curve.points]


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
