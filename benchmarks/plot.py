"""Pictures as SVG, written by hand so that a benchmark needs no plotting library."""

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


@dataclass(frozen=True)
class Bar:
    """A measured value, perhaps with its prediction."""

    name: str
    value: float
    predicted: float | None = None
    is_marked: bool = False


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
    """Write panels that share the horizontal axis, and the vertical one if limits are given."""
    columns = max(len(row) for row in rows)
    width, height = columns * (WIDTH + MARGIN) + MARGIN, len(rows) * (HEIGHT + MARGIN) + TOP + 20
    names = [name for name in COLOURS if any(name in panel.lines for row in rows for panel in row)]
    parts = opening(width, height, heading)
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


def write_bars(path: Path, heading: str, groups: Mapping[str, Sequence[Bar]]) -> None:
    """Write groups of bars, each group with a scale of its own."""
    row, length = 18, 420
    name_width = 20 + 6 * max(len(bar.name) for bars in groups.values() for bar in bars)
    lines = sum(len(bars) + 2 for bars in groups.values())
    parts = opening(name_width + length + 120, lines * row + 50, heading)
    y = 50.0
    for title, bars in groups.items():
        parts.append(f'<text x="12" y="{y}" class="title">{escape(title)}</text>')
        longest = max(max(bar.value, bar.predicted or 0.0) for bar in bars)
        for bar in bars:
            y += row
            width = bar.value / longest * length
            colour = "#1f77b4" if bar.is_marked else "#aec7e8"
            parts.append(f'<text x="{name_width - 8}" y="{y}" text-anchor="end">{escape(bar.name)}</text>')
            parts.append(
                f'<rect x="{name_width}" y="{y - 10}" width="{width:.1f}" height="12" fill="{colour}"/>'
            )
            end = width
            if bar.predicted is not None:
                x = name_width + bar.predicted / longest * length
                end = max(width, x - name_width)
                parts.append(
                    f'<line x1="{x:.1f}" y1="{y - 12}" x2="{x:.1f}" y2="{y + 4}" stroke="#d62728" '
                    'stroke-width="2"/>'
                )
            note = f"{bar.value:.3g}" + (", chosen" if bar.is_marked else "")
            parts.append(f'<text x="{name_width + end + 6:.1f}" y="{y}">{note}</text>')
        y += 2 * row
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def write_curves(path: Path, heading: str, curves: Mapping[str, Sequence[float]]) -> None:
    """Write curves over the index of their values, smoothed over a twentieth of their length.

    The axes start where the values do.
    """
    width, height, left, top = 520, 300, 50, 50
    smooth = {name: _means(values, max(1, len(values) // 20)) for name, values in curves.items() if values}
    low, high = min(map(min, smooth.values())), max(map(max, smooth.values()))
    parts = opening(width + left + 160, height + top + 40, heading)
    parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" class="axis"/>')
    for part in range(5):
        value = low + (high - low) * part / 4
        y = top + height - height * part / 4
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 4}" text-anchor="end">{value:.2f}</text>')
    colours = list(COLOURS.values())
    for number, (name, values) in enumerate(smooth.items()):
        colour = colours[number % len(colours)]
        places = (left + width * (place + 0.5) / len(values) for place in range(len(values)))
        heights = (top + height * (high - value) / ((high - low) or 1.0) for value in values)
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(places, heights, strict=True))
        parts.append(f'<polyline points="{drawn}" stroke="{colour}"/>')
        place = f'x="{left + width + 8}" y="{top + 14 + 16 * number}"'
        parts.append(f'<text {place} style="fill:{colour}">{escape(name)}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _means(values: Sequence[float], size: int) -> list[float]:
    return [
        sum(values[start : start + size]) / len(values[start : start + size])
        for start in range(0, len(values), size)
    ]


def opening(width: float, height: float, heading: str = "") -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}">',
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="white"/>',
        *([f'<text x="12" y="20" class="title">{escape(heading)}</text>'] if heading else []),
    ]
