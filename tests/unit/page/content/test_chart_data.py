"""Data of the charts: the curve that counts is first, and gaps replace what is not finite."""

from __future__ import annotations

import json
import math

import msgspec

from barnraise.history.view import CurveMark, CurvePoint, CurveView
from barnraise.history.view_builder import build_view
from barnraise.page.content.chart_data import MOST_CURVES, chart_data, comparison_data
from benchmarks.invented_run import RUN, example_run

VIEW = build_view(example_run(), run=RUN)


def test_chart_has_curves_and_marks_of_the_run() -> None:
    data = json.loads(chart_data(VIEW))
    assert [curve["name"] for curve in data["curves"]] == ["loss", "lr"]
    assert len(data["curves"][0]["steps"]) == len(data["curves"][0]["smooth"]) == 600
    assert {mark["kind"] for mark in data["marks"]} >= {"paused", "died", "recovered", "plan"}


def test_values_that_are_not_finite_become_gaps() -> None:
    points = tuple(
        CurvePoint(step, value, value, value, value) for step, value in enumerate((1.0, math.nan, math.inf))
    )
    view = msgspec.structs.replace(VIEW, curves=(CurveView(name="loss", points=points),))
    assert json.loads(chart_data(view))["curves"][0]["values"] == [1.0, None, None]


def test_hostile_names_are_printable_and_curves_bounded() -> None:
    curves = tuple(CurveView(name=f"\u202e{number}</script>", points=()) for number in range(50))
    mark = CurveMark(step=1, at=1.0, kind="note", text="\x1b[31m" + "x" * 5000)
    data = json.loads(chart_data(msgspec.structs.replace(VIEW, curves=curves, marks=(mark,))))
    assert len(data["curves"]) == MOST_CURVES
    assert "\u202e" not in data["curves"][0]["name"]
    assert "\x1b" not in data["marks"][0]["text"]
    assert len(data["marks"][0]["text"]) == 300


def test_comparison_has_runs_with_the_value_only() -> None:
    other = msgspec.structs.replace(VIEW, run="other", curves=())
    assert [run["name"] for run in json.loads(comparison_data([VIEW, other], "loss"))["runs"]] == [RUN]
