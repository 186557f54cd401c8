"""Arrangement of the screen's parts: one column on a narrow terminal, two on a wide one. Pure."""

from __future__ import annotations

from barnraise.cli.watch.curve import draw_curve, legend
from barnraise.cli.watch.lines import Line, beside, section, wrapped
from barnraise.cli.watch.panels import (
    Clock,
    clock_time,
    event_lines,
    fact_lines,
    headline_lines,
    link_lines,
    machine_lines,
    phase_lines,
    plan_lines,
    progress_line,
    title_line,
)
from barnraise.cli.watch.snapshot import Snapshot
from barnraise.history.view import RunView

WIDE = 140
_NARROW_CURVE, _WIDE_CURVE = 4, 12
_FEWEST_POINTS = 2
_FEWEST_LINES, _MOST_LINES = 2, 4  # of one event
_FIRST_EVENTS, _MOST_EVENTS = 3, 100
_GAP = 4


def page_lines(snapshot: Snapshot, width: int, *, stale: str = "", clock: Clock = clock_time) -> list[Line]:
    """Return the whole screen of a run. ``stale``: since when nothing came; empty if it is live."""
    view = snapshot.view
    top = [
        title_line(view, width, clock),
        *wrapped(stale, width, "error"),
        *headline_lines(view, width),
        *(wrapped(f"waiting: {snapshot.waits_for}", width, "warning", "  ") if snapshot.waits_for else ()),
        progress_line(view, width),
        (),
    ]
    if width < WIDE:
        return [*top, *_one_column(snapshot, width, clock)]
    left = (width - _GAP) // 2
    right = width - _GAP - left
    story = section("Events, newest first", _events(view, left, clock, 0, _MOST_EVENTS))
    columns = beside(
        [*_machines(snapshot, left, clock), *_facts(view, left), *story],
        [*_curve(view, right, _WIDE_CURVE), *_causes(view, right)],
        left,
        _GAP,
    )
    return [*top, *columns]


def _one_column(snapshot: Snapshot, width: int, clock: Clock) -> list[Line]:
    """Return the parts below each other: what is new comes before what explains it."""
    view = snapshot.view
    return [
        *_machines(snapshot, width, clock),
        *_curve(view, width, _NARROW_CURVE),
        *section("Newest events", _events(view, width, clock, 0, _FIRST_EVENTS, _FEWEST_LINES)),
        *_causes(view, width),
        *_facts(view, width),
        *section("Earlier events", _events(view, width, clock, _FIRST_EVENTS, _MOST_EVENTS)),
    ]


def _machines(snapshot: Snapshot, width: int, clock: Clock) -> list[Line]:
    return section("Machines", machine_lines(snapshot, width, clock))


def _curve(view: RunView, width: int, height: int) -> list[Line]:
    curve = view.curve()
    if curve is None or len(curve.points) < _FEWEST_POINTS:
        return []
    drawn = draw_curve(curve, view.marks, width, height)
    return section(curve.name.capitalize(), [*drawn, *wrapped(legend(view.marks), width, "faint")])


def _causes(view: RunView, width: int) -> list[Line]:
    """Return what explains the speed: the time of a step, the links and the plans."""
    return [
        *section("Time of a step", phase_lines(view, width)),
        *section("Links", link_lines(view.links, width)),
        *section("Plans", plan_lines(view.plans, width)),
    ]


def _facts(view: RunView, width: int) -> list[Line]:
    return section("So far", fact_lines(view, width))


def _events(
    view: RunView, width: int, clock: Clock, start: int, end: int, most_lines: int = _MOST_LINES
) -> list[Line]:
    return event_lines(list(reversed(view.events))[start:end], width, clock, most_lines)
