"""Drawing of machines and links: where the lines and circles of the map are. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from barnraise.core.units import format_rate
from barnraise.history.view import LinkView, MachineView

WIDTH, HEIGHT = 640, 420
MOST_LINES = 200
_RADIUS_X, _RADIUS_Y = 190.0, 140.0
_MOST_UPRIGHT = 14  # machines whose names stand upright
_MOST_LABELLED = 6  # lines with their speed
_SLOW = 0.25  # of the median
_THINNEST, _THICKEST = 1.0, 6.0


@dataclass(frozen=True)
class MachineMark:
    """Circle of a machine with its name. ``turn``: degrees of the name."""

    x: float
    y: float
    label_x: float
    label_y: float
    anchor: str
    turn: float
    machine: MachineView


@dataclass(frozen=True)
class LinkLine:
    """Line of a link in both directions. ``label``: empty if there is no room."""

    x1: float
    y1: float
    x2: float
    y2: float
    width: float
    is_slow: bool
    title: str
    label: str = ""


@dataclass(frozen=True)
class MachineMap:
    """Drawing of a run's machines. ``hidden``: faster links that are left out."""

    machines: tuple[MachineMark, ...]
    lines: tuple[LinkLine, ...]
    hidden: int = 0


def draw_map(machines: Sequence[MachineView], links: Sequence[LinkView]) -> MachineMap:
    """Return the drawing; of many links, only the slowest ones."""
    marks = [_mark(machine, index, len(machines)) for index, machine in enumerate(machines)]
    places = {mark.machine.node: (mark.x, mark.y) for mark in marks}
    pairs = _pairs(links, places)
    speeds = [link.mbps for link in pairs if link.mbps]
    median = statistics.median(speeds) if speeds else 0.0
    shown = sorted(pairs, key=lambda link: link.mbps or 0.0)[:MOST_LINES]
    is_labelled = len(shown) <= _MOST_LABELLED
    lines = tuple(_line(link, places, median, is_labelled=is_labelled) for link in shown)
    return MachineMap(tuple(marks), lines, len(pairs) - len(shown))


def _mark(machine: MachineView, index: int, count: int) -> MachineMark:
    angle = -math.pi / 2 + 2 * math.pi * index / max(1, count)
    if count == 1:
        x, y, angle = 0.0, 0.0, math.pi / 2
    else:
        x, y = _RADIUS_X * math.cos(angle), _RADIUS_Y * math.sin(angle)
    is_left = math.cos(angle) < -0.01
    if count > _MOST_UPRIGHT:
        out = 14.0
        turn = math.degrees(math.atan2(y, x)) + (180 if is_left else 0)
        anchor = "end" if is_left else "start"
    else:
        out, turn = 26.0, 0.0
        anchor = "middle" if abs(math.cos(angle)) < 0.3 else "end" if is_left else "start"
    return MachineMark(
        x=round(x, 1),
        y=round(y, 1),
        label_x=round(x + out * math.cos(angle), 1),
        label_y=round(y + out * math.sin(angle), 1),
        anchor=anchor,
        turn=round(turn, 1),
        machine=machine,
    )


def _pairs(links: Sequence[LinkView], places: Mapping[str, object]) -> list[LinkView]:
    """Return the slower direction of each pair of machines that are on the map."""
    slowest: dict[frozenset[str], LinkView] = {}
    for link in links:
        pair = frozenset((link.source_node, link.target_node))
        if len(pair) < 2 or not pair <= places.keys():
            continue
        known = slowest.get(pair)
        if known is None or (link.mbps or math.inf) < (known.mbps or math.inf):
            slowest[pair] = link
    return list(slowest.values())


def _line(
    link: LinkView, places: Mapping[str, tuple[float, float]], median: float, *, is_labelled: bool
) -> LinkLine:
    (x1, y1), (x2, y2) = places[link.source_node], places[link.target_node]
    speed = format_rate(link.mbps * 1e6) if link.mbps else "speed unknown"
    trip = f", {link.rtt_ms:.3g} ms there and back" if link.rtt_ms is not None else ""
    width = _THINNEST + max(0.0, math.log10(link.mbps or 1.0))
    return LinkLine(
        x1=x1,
        y1=y1,
        x2=x2,
        y2=y2,
        width=round(min(_THICKEST, width), 1),
        is_slow=bool(link.mbps) and (link.mbps or 0.0) < _SLOW * median,
        title=f"{link.source} to {link.target}: {speed}{trip}",
        label=speed if is_labelled and link.mbps else "",
    )
