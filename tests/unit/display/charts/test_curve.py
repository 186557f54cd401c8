"""Charts of the invented run show what happened, and those of a hostile run stay whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from xml.etree import ElementTree

import msgspec
import pytest

from barnraise.display.charts.bars import draw_phases, draw_stacks
from barnraise.display.charts.curve import draw_curve, draw_rates
from barnraise.display.charts.elements import Element, markup, svg_file
from barnraise.display.charts.network import draw_network
from barnraise.display.charts.spans import machine_spans
from barnraise.display.charts.theme import CHART_STYLE
from barnraise.display.charts.timeline import draw_timeline
from barnraise.history.entries import Entry
from barnraise.history.view import CurvePoint, CurveView, RunView
from barnraise.history.view_builder import build_view
from tests.unit.display.hostile_run import hostile_run
from tests.unit.history.example_run import DESK, MAC, NAS, START, example_run

VIEW = build_view(example_run())
TAGS = {"svg", "style", "title", "g", "line", "path", "text", "rect", "circle", "polyline", "polygon"}
Draw = Callable[[RunView, float], Element]
CHARTS: dict[str, Draw] = {
    "curve": lambda view, width: draw_curve(view.curves[0], view.marks, width=width),
    "rates": lambda view, width: draw_rates(view.rates, view.marks, end=view.step, width=width),
    "timeline": lambda view, width: draw_timeline(view, width=width),
    "phases": lambda view, width: draw_phases(view.phases, width=width),
    "network": lambda view, width: draw_network(view, width=width),
}


def _texts(picture: Element) -> list[str]:
    return ["".join(each.itertext()) for each in picture.iter("text")]


def _classes(picture: Element) -> set[str]:
    return {name for each in picture.iter() for name in each.get("class", "").split()}


def test_curve_names_machines_that_came_and_went() -> None:
    picture = draw_curve(VIEW.curves[0], VIEW.marks)
    texts = " | ".join(_texts(picture))
    for words in ("new plan", "nas is paused +1", "mac died", "mac has recovered"):
        assert words in texts
    smooth = next(each for each in picture.iter("polyline") if each.get("class") == "br-smooth")
    assert len(smooth.get("points", "").split()) == 600


def test_mark_is_at_the_place_of_its_step() -> None:
    picture = draw_curve(VIEW.curves[0], VIEW.marks)
    smooth = next(each for each in picture.iter("polyline") if each.get("class") == "br-smooth")
    places = [float(point.split(",")[0]) for point in smooth.get("points", "").split()]
    died = next(g for g in picture.iter("g") if "mac died" in "".join(g.itertext()))
    line = next(died.iter("line"))
    assert float(line.get("x1", "0")) == pytest.approx(places[320], abs=0.2)


def test_value_that_is_not_finite_is_a_gap_with_a_cross() -> None:
    values = [1.0, 2.0, float("nan"), 4.0, float("inf"), 6.0, 7.0]
    points = tuple(CurvePoint(step, value, value, value, value) for step, value in enumerate(values))
    picture = draw_curve(CurveView(name="loss", points=points))
    raw = [each for each in picture.iter("polyline") if each.get("class") == "br-raw"]
    assert len(raw) == 2, "before and after"
    assert [c.get("class") for c in picture.iter("circle")] == ["br-raw br-dot", "br-smooth br-dot"]
    assert markup(picture).count("not a finite number") == 2


def test_spans_follow_the_events() -> None:
    spans = machine_spans(VIEW)
    assert [span.state for span in spans[MAC.hex()]] == ["trains", "died", "joining", "trains"]
    assert [span.state for span in spans[NAS.hex()]] == ["trains", "paused"]
    assert [span.state for span in spans[DESK.hex()]] == ["trains"]
    for each in spans.values():
        assert all(before.end == after.start for before, after in pairwise(each))
        assert START < each[0].start < START + 60, "preparation is not training"
        assert each[-1].end == VIEW.ended_at


def test_session_without_a_step_does_not_claim_to_train() -> None:
    view = build_view(example_run(0))
    assert set(machine_spans(view).values()) == {()}
    plain = msgspec.structs.replace(view, start=msgspec.structs.replace(view.start, is_session=False))
    assert [span.state for span in machine_spans(plain)[DESK.hex()]] == ["trains"]


def test_timeline_says_states_in_words() -> None:
    texts = _texts(draw_timeline(VIEW))
    assert {"desk", "mac", "nas", "trains", "paused", "dead", "checkpoints"} <= set(texts)


def test_phases_show_measured_and_predicted_time() -> None:
    texts = _texts(draw_phases(VIEW.phases))
    assert texts[0].startswith("measured: 1.4")
    assert "predicted: 1.38 s" in texts
    assert "compute 1.23 s" in texts


def test_slow_link_is_dashed_and_named() -> None:
    picture = draw_network(VIEW)
    slow = [line for line in picture.iter("line") if "br-slow" in (line.get("class") or "")]
    assert len(slow) == 2
    assert "940 Mbit/s, 0.4 ms" in _texts(picture)


def test_charts_without_data_say_so() -> None:
    empty = RunView(run="r", state="running", headline="", start=VIEW.start, started_at=None)
    assert _texts(draw_curve(CurveView(name="loss", points=()))) == ["no finite value was logged"]
    assert _texts(draw_rates((), end=0)) == ["no step was timed"]
    assert _texts(draw_timeline(empty)) == ["no machine is known"]
    assert _texts(draw_network(empty)) == ["no machine is known"]
    assert _texts(draw_phases(())) == _texts(draw_stacks((), label="")) == ["no time was measured"]


@pytest.mark.parametrize("width", [720.0, 340.0])
@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize("entries", [example_run, hostile_run])
def test_chart_is_whole_small_and_strict(entries: Callable[[], list[Entry]], name: str, width: float) -> None:
    picture = CHARTS[name](build_view(entries()), width)
    text = svg_file(picture, CHART_STYLE)
    assert len(text) < 300_000
    assert {each.tag.rpartition("}")[2] for each in ElementTree.fromstring(text).iter()} <= TAGS
    assert 'style="' not in text, "a strict content security policy forbids it"
    known = set(re.findall(r"\.(br-[a-z-]+)", CHART_STYLE))
    assert _classes(picture) <= known
    assert picture.get("aria-label")
    for each in picture.iter("text"):
        assert -40 <= float(each.get("x", "0")) <= width
