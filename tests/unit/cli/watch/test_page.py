"""The page of an invented run, as it is drawn on narrow and wide terminals.

``python -m tests.unit.cli.watch.test_page`` writes the pictures again.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from barnraise.cli.watch.lines import columns_of, text_of
from barnraise.cli.watch.page import page_lines
from barnraise.cli.watch.snapshot import Snapshot
from barnraise.history.view import CurvePoint, CurveView, RunView
from barnraise.history.view_builder import build_view
from benchmarks.invented_run import RUN, START, example_run

_PAGES = Path(__file__).parent / "pages"
_CASES = [(80, 300), (200, 440), (80, 600)]


def clock(at: float) -> str:
    """Return the minutes and seconds since the start, so that no time zone matters."""
    minutes, seconds = divmod(int(at - START), 60)
    return f"{minutes:02}:{seconds:02}"


def view(step: int) -> RunView:
    return build_view(example_run(step), run=RUN)


def picture(snapshot: Snapshot, width: int, stale: str = "") -> str:
    return "\n".join(map(text_of, page_lines(snapshot, width, stale=stale, clock=clock))) + "\n"


@pytest.mark.parametrize(("width", "step"), _CASES)
def test_page_is_drawn_as_before(width: int, step: int) -> None:
    path = _PAGES / f"{width}-columns-step-{step}.txt"
    assert picture(Snapshot(view(step)), width) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 80, 139, 140, 200])
@pytest.mark.parametrize("step", [0, 1, 150, 360, 600])
def test_no_line_is_wider_than_the_terminal(width: int, step: int) -> None:
    snapshot = Snapshot(view(step), "h1 receives 3 of 40 MiB " * 5, {"nas": "its user paused it"})
    rows = picture(snapshot, width, "NOT LIVE: nothing came from the run for 40 s").split("\n")
    assert max(map(columns_of, rows)) <= width


def test_most_important_lines_fit_a_small_terminal() -> None:
    top = picture(Snapshot(view(360)), 80).split("\n")[:23]
    text = "\n".join(top)
    assert "mac has died" in text
    assert "step 360 of 600" in text
    assert "Newest events" in text
    assert all(any(row.startswith(name) for row in top) for name in ("desk", "mac", "nas"))


def test_old_measurements_are_not_shown_as_current() -> None:
    later = replace(view(100), at=view(100).at + 3600)
    text = picture(Snapshot(later), 200)
    assert "as of " in text
    assert "310 W" not in text


def test_names_and_texts_of_others_cannot_command_the_terminal() -> None:
    known = view(360)
    evil = "\x1b[2J\x1b]0;x\x07\u202eevil\n"
    hostile = replace(
        known,
        headline=evil,
        start=replace(known.start, title=evil, started_by=evil),
        machines=tuple(replace(machine, name=evil, device=evil) for machine in known.machines),
        links=tuple(replace(link, source=evil, target=evil) for link in known.links),
        events=tuple(replace(event, text=evil) for event in known.events),
        plans=tuple(replace(plan, sync=evil, reason=evil, shares={evil: 1.0}) for plan in known.plans),
        curves=tuple(replace(curve, name=evil) for curve in known.curves),
        metric=evil,
        checkpoints=tuple(replace(saved, machines=(evil,)) for saved in known.checkpoints),
        phases=tuple(replace(phase, name=evil) for phase in known.phases),
    )
    for width in (80, 200):
        text = picture(Snapshot(hostile, evil, {evil: evil}), width, evil)
        assert all(sign.isprintable() or sign == "\n" for sign in text)


def test_curves_of_values_that_are_not_finite_are_drawn() -> None:
    values = [math.nan, math.inf, -math.inf, 1.0, 1e30, -1e30, 2.0]
    points = tuple(CurvePoint(step, value, value, value, value) for step, value in enumerate(values))
    for shown in (points, points[:2], points[3:4], points[3:5]):
        strange = replace(view(10), curves=(CurveView(name="loss", points=shown),), metric="loss")
        assert "step 10" in picture(Snapshot(strange), 80)


if __name__ == "__main__":
    _PAGES.mkdir(exist_ok=True)
    for columns, shown_step in _CASES:
        target = _PAGES / f"{columns}-columns-step-{shown_step}.txt"
        target.write_text(picture(Snapshot(view(shown_step)), columns), encoding="utf-8")
