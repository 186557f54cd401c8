"""Bars of a step's time by phase, measured above predicted. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from barnraise.display.charts.elements import Element, element, svg
from barnraise.display.charts.plot import text, text_width
from barnraise.display.charts.scale import Scale, short_seconds
from barnraise.history.entries import PHASES
from barnraise.history.view import PhaseView

_BAR, _ROW = 26, 40
_LEGEND = 22

Part = tuple[str, float]  # name of a phase or of waiting, and its seconds


def draw_phases(phases: Sequence[PhaseView], *, width: float = 720) -> Element:
    """Return two bars of a step: where the measured time went, and where the plan expected it."""
    rows = []
    for name, of in (("measured", "measured_s"), ("predicted", "predicted_s")):
        parts = [(phase.name, getattr(phase, of)) for phase in phases]
        if any(seconds is not None for _, seconds in parts):
            rows.append((name, [(phase, seconds or 0.0) for phase, seconds in parts]))
    return draw_stacks(rows, label="time of a step by phase", width=width)


def draw_stacks(rows: Sequence[tuple[str, Sequence[Part]]], *, label: str, width: float = 720) -> Element:
    """Return a bar for each row, made of its parts, and a legend with the names."""
    rows = [(name, [part for part in parts if 0 < part[1] < math.inf]) for name, parts in rows]
    longest = max((sum(seconds for _, seconds in parts) for _, parts in rows), default=0.0)
    if not longest:
        return svg(width, 40, label, text(8, 24, "no time was measured", "br-quiet"))
    scale = Scale(0.0, longest, 0.0, width - 2)
    drawn: list[Element] = []
    for row, (name, parts) in enumerate(rows):
        top = row * (_ROW + 8)
        total = sum(seconds for _, seconds in parts)
        drawn.append(text(0, top + 11, f"{name}: {short_seconds(total)}", "br-strong"))
        drawn.extend(_stack(scale, parts, top + 16))
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    top = len(rows) * (_ROW + 8) + 4
    legend, height = _legend(names, top, width)
    return svg(width, height, label, *drawn, *legend)


def _stack(scale: Scale, parts: Sequence[Part], top: float) -> Iterator[Element]:
    before = 0.0
    for name, seconds in parts:
        start, end = scale.place(before), scale.place(before + seconds)
        words = f"{name} {short_seconds(seconds)}"
        yield element(
            "rect",
            element("title", words),
            x=start + 0.5,
            y=top,
            width=max(0.5, end - start - 1),
            height=_BAR,
            rx=2,
            class_=_class(name),
        )
        is_bold = name in PHASES
        for shown in (words, short_seconds(seconds)):
            if text_width(shown, is_bold=is_bold) + 8 < end - start:
                yield text(start + 6, top + 17, shown, "br-on-bar" if is_bold else "")
                break
        before += seconds


def _legend(names: Sequence[str], top: float, width: float) -> tuple[list[Element], float]:
    parts, left, line = [], 0.0, top
    for name in names:
        needed = text_width(name) + 38
        if left + needed > width:
            left, line = 0.0, line + _LEGEND
        parts.append(element("rect", x=left + 0.5, y=line, width=12, height=12, rx=2, class_=_class(name)))
        parts.append(text(left + 17, line + 10, name, "br-quiet"))
        left += needed
    return parts, line + _LEGEND


def _class(name: str) -> str:
    return f"br-{name}" if name in PHASES else "br-waiting"
