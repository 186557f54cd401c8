"""Map of the machines and their links: a circle of boxes, with speed and delay on each link. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from barnraise.display.charts.elements import Element, element, svg
from barnraise.display.charts.plot import NARROW, shortened, text, text_width
from barnraise.display.charts.scale import short_number
from barnraise.history.sentences import counted
from barnraise.history.view import LinkView, MachineView, RunView

MOST_MACHINES = 16
_MOST_LABELLED = 6  # machines; more links would cover each other's texts
_BOX, _NARROW_BOX, _HIGH = 140, 92, 38
_HEIGHTS = {1: 60.0, 2: 130.0}  # of a map with so few machines
_SLOW_PART = 0.25  # of the fastest link
_WORDS = {"trains": "trains", "ended": "done"}

_Place = tuple[float, float]


def draw_network(view: RunView, *, width: float = 720) -> Element:
    """Return the machines on a circle; a slow link is dashed. Larger groups show the first machines."""
    machines = view.machines[:MOST_MACHINES]
    label = f"{counted(len(view.machines), 'machine')} and their links"
    if not machines:
        return svg(width, 40, label, text(8, 24, "no machine is known", "br-quiet"))
    height = _HEIGHTS.get(len(machines), min(420.0, 170 + 30 * len(machines)))
    box = _NARROW_BOX if width < NARROW else _BOX
    places = _places(machines, (width, height), box)
    links = _both_directions(view, places)
    fastest = max((link.mbps for link in links if link.mbps is not None), default=0.0)
    parts = [part for link in links for part in _link(link, places, fastest, box)]
    for machine in machines:
        parts.extend(_box(machine, places[machine.node], box))
    if len(view.machines) > MOST_MACHINES:
        more = f"and {counted(len(view.machines) - MOST_MACHINES, 'more machine')}"
        parts.append(text(width - 8, height - 6, more, "br-quiet", "end"))
    return svg(width, height, label, *parts)


def _places(machines: tuple[MachineView, ...], size: tuple[float, float], box: float) -> dict[str, _Place]:
    middle = (size[0] / 2, size[1] / 2)
    if len(machines) == 1:
        return {machines[0].node: middle}
    across, down = min(260.0, middle[0] - box / 2 - 4), middle[1] - _HIGH / 2 - 4
    begin = math.pi if len(machines) == 2 else -math.pi / 2
    turns = [begin + 2 * math.pi * number / len(machines) for number in range(len(machines))]
    # An odd circle has no machine at the bottom, so its heights are stretched.
    low, high = min(map(math.sin, turns)), max(map(math.sin, turns))
    stretch = 2 / (high - low) if len(machines) > 2 else 1.0
    centre = (low + high) / 2 if len(machines) > 2 else 0.0
    return {
        machine.node: (
            middle[0] + across * math.cos(turn),
            middle[1] + down * stretch * (math.sin(turn) - centre),
        )
        for machine, turn in zip(machines, turns, strict=True)
    }


def _both_directions(view: RunView, places: dict[str, _Place]) -> list[LinkView]:
    """Return one link for each pair of machines on the map: the slower direction."""
    pairs: dict[tuple[str, str], LinkView] = {}
    for link in view.links:
        ends = link.source_node, link.target_node
        if ends[0] not in places or ends[1] not in places or ends[0] == ends[1]:
            continue
        known = pairs.setdefault((min(ends), max(ends)), link)
        if link.mbps is not None and (known.mbps is None or link.mbps < known.mbps):
            pairs[min(ends), max(ends)] = link
    return list(pairs.values())


def _link(link: LinkView, places: dict[str, _Place], fastest: float, box: float) -> Iterator[Element]:
    (x1, y1), (x2, y2) = places[link.source_node], places[link.target_node]
    is_slow = link.mbps is not None and link.mbps < fastest * _SLOW_PART
    known = [f"{short_number(link.mbps)} Mbit/s"] if link.mbps is not None else []
    known += [f"{short_number(link.rtt_ms)} ms"] if link.rtt_ms is not None else []
    words = ", ".join(known) or "not measured"
    title = element("title", f"{link.source} to {link.target}: {words}")
    kind = "br-link br-slow" if is_slow else "br-link"
    yield element("line", title, x1=x1, y1=y1, x2=x2, y2=y2, class_=kind, stroke_width=1.5)
    room = abs(x1 - x2) - box - 20 if abs(y1 - y2) < _HIGH else box
    if len(places) <= _MOST_LABELLED and text_width(words) < room:
        yield text((x1 + x2) / 2, (y1 + y2) / 2 + 4, words, "br-quiet br-halo", "middle")


def _box(machine: MachineView, place: _Place, box: float) -> Iterator[Element]:
    x, y = place
    kind = "br-node br-node-trains" if machine.state in ("trains", "ended") else "br-node"
    title = element("title", ": ".join(filter(None, (machine.name, machine.state_reason or machine.device))))
    yield element("rect", title, x=x - box / 2, y=y - _HIGH / 2, width=box, height=_HIGH, rx=6, class_=kind)
    yield text(x, y - 3, shortened(machine.name, int(box / 7.5)), "br-strong", "middle")
    yield text(x, y + 12, _WORDS.get(machine.state, machine.state), "br-quiet", "middle")
