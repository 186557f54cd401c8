"""Small multiples as SVG, written by hand so that a benchmark needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN, TOP = 260, 170, 46, 60
COLOURS = {
    "auto": "#111111",
    "ring": "#1f77b4",
    "tree": "#2ca02c",
    "doubling": "#ff7f0e",
    "star": "#d62728",
    "gloo": "#9467bd",
}
STYLE = (
    "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}.axis{stroke:#999;fill:none}"
    ".grid{stroke:#e5e5e5}polyline{fill:none;stroke-width:1.6}"
)


@dataclass(frozen=True)
class Panel:
    """One chart: named lines of (bytes, value), both drawn on logarithmic axes."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


Rows = Sequence[Sequence[Panel]]


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    length: float

    def __call__(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.start + min(max(share, 0.0), 1.0) * self.length


def write(path: Path, heading: str, rows: Rows, limits: tuple[float, float] | None) -> None:
    """All panels share the horizontal axis; the vertical one too if limits are given."""
    columns = max(len(row) for row in rows)
    width, height = columns * (WIDTH + MARGIN) + MARGIN, len(rows) * (HEIGHT + MARGIN) + TOP + 20
    names = [name for name in COLOURS if any(name in panel.lines for row in rows for panel in row)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="20" class="title">{escape(heading)}</text>',
    ]
    for index, name in enumerate(names):
        x = MARGIN + index * 90
        stroke = f'stroke="{COLOURS[name]}" stroke-width="3"'
        parts.append(f'<line x1="{x}" y1="36" x2="{x + 20}" y2="36" {stroke}/>')
        parts.append(f'<text x="{x + 25}" y="40">{name}</text>')
    for row_index, row in enumerate(rows):
        for column, panel in enumerate(row):
            left, top = MARGIN + column * (WIDTH + MARGIN), TOP + row_index * (HEIGHT + MARGIN)
            parts += _panel(panel, left, top, limits)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(panel: Panel, left: float, top: float, limits: tuple[float, float] | None) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    if not points:
        return []
    across = _Scale(1e3, 3e8, left, WIDTH)
    low, high = limits or (min(y for _, y in points) / 1.3, max(y for _, y in points) * 1.3)
    upward = _Scale(low, high, top + HEIGHT, -HEIGHT)
    parts = [
        f'<text x="{left}" y="{top - 5}" class="title">{escape(panel.title)}</text>',
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" class="axis"/>',
    ]
    for size, label in ((1e3, "1 KB"), (1e4, ""), (1e5, ""), (1e6, "1 MB"), (1e7, ""), (1e8, "100 MB")):
        x = across(size)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + HEIGHT}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + HEIGHT + 14}">{label}</text>')
    for value in _ticks(low, high):
        y = upward(value)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for name, line in panel.lines.items():
        drawn = " ".join(f"{across(x):.1f},{upward(y):.1f}" for x, y in line)
        dash = ' stroke-dasharray="5 3"' if name == "auto" else ""
        parts.append(f'<polyline points="{drawn}" stroke="{COLOURS.get(name, "#777")}"{dash}/>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    steps = (1, 2, 5) if high / low < 100 else (1,)
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**ten for ten in tens for step in steps if low <= step * 10.0**ten <= high]
