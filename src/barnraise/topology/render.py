"""Text rendering of the graph: a picture for a few machines, a matrix for many. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from barnraise.core.sanitize import printable
from barnraise.core.units import format_duration, format_rate, format_size
from barnraise.topology.devices import Device, Machine
from barnraise.topology.graph import LinkFacts, NodeFacts, Pair, TopologyGraph

_MOST_DRAWN = 8
_LEAST_STEP = 5
_WIDTH = 24
_NAME = 20
_DEVICE = 24
_MATRIX_COLUMNS = 9
_FAST_MBPS = 800.0
_SLOW_MBPS = 50.0
_LETTERS = "ABCDEFGH"
_ADVERTISING = (
    r"\b(\d+(st|nd|rd|th) Gen|Intel|AMD|NVIDIA|GeForce|Radeon Graphics|CPU|Processor|Graphics|"
    r"\w+-Core)\b"
)


@dataclass(frozen=True)
class _Pen:
    """Characters of a picture: (line, crossing) for each kind of link."""

    end: str
    post: str
    gap: str
    fast: tuple[str, str]
    medium: tuple[str, str]
    slow: tuple[str, str]
    unknown: tuple[str, str]


_FINE = _Pen("●", "│", "○", ("═", "╪"), ("─", "┼"), ("╌", "┼"), ("·", "│"))
_PLAIN = _Pen("o", "|", "x", ("=", "#"), ("-", "+"), ("~", "+"), (".", "|"))


def draw_graph(graph: TopologyGraph, *, plain: bool = False) -> str:
    """Draw the graph as text. ``plain``: ASCII only, for terminals that cannot show more."""
    if not graph.nodes:
        return "no machines"
    names = _names(graph)
    if len(graph.nodes) > _MOST_DRAWN:
        text = _matrix(graph, names)
    else:
        text = _picture(graph, names, _PLAIN if plain else _FINE)
    return text.encode("ascii", "replace").decode() if plain else text


def describe_device(device: Device) -> str:
    """Describe a device, such as ``NVIDIA RTX 4090 (cuda), 24 GiB, 61 TFLOPS``."""
    parts = [f"{_clean(short_device_name(device.name), _DEVICE) or 'unknown'} ({device.kind})"]
    if device.memory_bytes:
        parts.append(format_size(device.memory_bytes))
    if device.tflops_fp32 is not None:
        parts.append(f"{device.tflops_fp32:.3g} TFLOPS")
    return ", ".join(parts)


def short_device_name(name: str) -> str:
    """Return a device's name without the words of its maker's advertising, such as ``Core i7-9750H``."""
    text = re.sub(r"\((R|TM|C)\)|[®™]", " ", printable(name), flags=re.IGNORECASE)
    text = re.sub(r"@.*|\bwith\b.*", " ", text)
    text = re.sub(_ADVERTISING, " ", text, flags=re.IGNORECASE)
    return " ".join(text.split()) or " ".join(printable(name).split())


def main_device(machine: Machine) -> Device | None:
    """Return the device that a run would use: the fastest, an accelerator before the CPU."""
    rank = {"cuda": 0, "xpu": 1, "mps": 1, "cpu": 2}
    return min(
        machine.devices,
        key=lambda device: (rank[device.kind], -(device.tflops_fp32 or 0.0), device.index),
        default=None,
    )


def _picture(graph: TopologyGraph, names: dict[str, str], pen: _Pen) -> str:
    """Draw a column for each machine and a row for each link, the fastest on top."""
    posts = {facts.node: place for place, facts in enumerate(graph.nodes)}
    width = max(len(name) for name in names.values())
    lines = []
    for facts in graph.nodes:
        line = f"{_LETTERS[posts[facts.node]]}  {names[facts.node]:<{width}}  {_summary(facts)}"
        lines.append(line.rstrip())
    count = len(posts)
    if count == 1:
        return lines[0]
    step = max(_LEAST_STEP, _WIDTH // count)
    lines += ["", (" " * (step - 1)).join(_LETTERS[:count])]
    slowest = graph.slowest() if len(graph.links) > 1 else None
    fastest_first = sorted(graph.links, key=_slowness, reverse=True)
    for link in sorted(fastest_first, key=lambda link: link.mbps is None):
        line, crossing = _stroke(link, pen)
        label = f"{_rate(link):>12}  {format_duration(link.rtt_s):>7}"
        if slowest is link and link.mbps is not None:
            label += "  slowest"
        rung = _rung(posts[link.a], posts[link.b], count, (line, crossing, pen.end, pen.post), step)
        lines.append(f"{rung}  {label}")
    for a, b in graph.missing_pairs():
        rung = _rung(posts[a], posts[b], count, (" ", pen.post, pen.gap, pen.post), step)
        lines.append(f"{rung}  {'no link':>12}")
    return "\n".join(lines)


def _rung(first: int, last: int, count: int, signs: tuple[str, str, str, str], step: int) -> str:
    line, crossing, end, post = signs
    text = ""
    for place in range(count):
        text += end if place in (first, last) else crossing if first < place < last else post
        if place + 1 < count:
            text += (line if first <= place < last else " ") * (step - 1)
    return text


def _stroke(link: LinkFacts, pen: _Pen) -> tuple[str, str]:
    if link.mbps is None:
        return pen.unknown
    if link.mbps >= _FAST_MBPS:
        return pen.fast
    return pen.medium if link.mbps >= _SLOW_MBPS else pen.slow


def _matrix(graph: TopologyGraph, names: dict[str, str]) -> str:
    """Draw a matrix: Mbit/s above the diagonal, milliseconds below it."""
    facts = {(link.a, link.b): link for link in graph.links}
    width = max(len(name) for name in names.values())
    digits = len(str(len(graph.nodes)))
    cell = 6
    head = " " * (digits + 2 + width)
    lines = ["Mbit/s above the diagonal, round trip in ms below; - no link, ? not measured", ""]
    places = range(len(graph.nodes))
    for start in places[::_MATRIX_COLUMNS]:
        shown = places[start : start + _MATRIX_COLUMNS]
        lines += [""] if start else []
        lines.append(head + "".join(f"{number + 1:>{cell}}" for number in shown))
        for row, down in enumerate(graph.nodes):
            cells = []
            for column in shown:
                across = graph.nodes[column]
                pair: Pair = (down.node, across.node) if row < column else (across.node, down.node)
                cells.append(f"{_cell(facts.get(pair), row, column):>{cell}}")
            lines.append(f"{row + 1:>{digits}}  {names[down.node]:<{width}}" + "".join(cells))
    slowest = graph.slowest()
    if slowest is not None and slowest.mbps is not None:
        lines += ["", f"slowest: {names[slowest.a]} and {names[slowest.b]}, {_rate(slowest)}"]
    return "\n".join(lines)


def _cell(link: LinkFacts | None, row: int, column: int) -> str:
    if row == column:
        return "\\"
    if link is None:
        return "-"
    if row > column:
        return _figure(link.rtt_s * 1000)
    return "?" if link.mbps is None else _figure(link.mbps)


def _figure(value: float) -> str:
    """Format a number in at most five characters."""
    if value >= 100_000:
        return f"{value / 1000:.0f}k"[:5]
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def _names(graph: TopologyGraph) -> dict[str, str]:
    """Return a label for each node: its name, with the start of its id if names are equal."""
    short = {facts.node: _clean(facts.name, _NAME) or facts.node[:8] for facts in graph.nodes}
    called = list(short.values())
    return {node: name if called.count(name) == 1 else f"{name} ({node[:8]})" for node, name in short.items()}


def _summary(facts: NodeFacts) -> str:
    device = None if facts.machine is None else main_device(facts.machine)
    return "" if device is None else describe_device(device)


def _rate(link: LinkFacts) -> str:
    return "not measured" if link.mbps is None else format_rate(link.mbps * 1e6)


def _slowness(link: LinkFacts) -> tuple[bool, float, float, str, str]:
    return (link.mbps is None, link.mbps or 0.0, -link.rtt_s, link.a, link.b)


def _clean(text: str, max_length: int = 60) -> str:
    """Remove control characters, since the text comes from other machines."""
    shown = printable(text)
    return shown if len(shown) <= max_length else shown[: max_length - 1] + "…"
