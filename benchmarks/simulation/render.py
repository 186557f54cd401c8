"""SVG pictures of simulated against measured times, and of the step times of many machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from benchmarks.plot import opening

_SIDE, _LEFT, _TOP = 300.0, 60.0, 50.0
_BARS_LEFT, _BAR, _LONGEST = 680.0, 20.0, 220.0
_COLOURS = {"taken": "#1f77b4", "other": "#bbbbbb", "session": "#d62728"}


class Dot(NamedTuple):
    """Seconds; ``kind``: a sum by the strategy that is taken, by another one, or a session's batch."""

    measured_s: float
    simulated_s: float
    kind: str


class Bar(NamedTuple):
    """Seconds of a batch, and of them computing."""

    name: str
    step_s: float
    computing_s: float


def draw(path: Path, dots: Sequence[Dot], bars: Sequence[Bar]) -> None:
    height = max(_TOP + _SIDE + 40, _TOP + 30 + len(bars) * 2 * _BAR)
    width = _BARS_LEFT + _LONGEST + 60
    parts = [*opening(width, height), *_dots(dots), *_bars(bars), "</svg>"]
    path.write_text("\n".join(parts) + "\n")


def _dots(dots: Sequence[Dot]) -> list[str]:
    values = [value for dot in dots for value in dot[:2]]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1

    def place(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * _SIDE

    bottom = _TOP + _SIDE
    parts = [
        f'<text x="{_LEFT}" y="20" class="title">Four hosts of the lab: seconds</text>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" class="axis"/>',
        f'<text x="{_LEFT + _SIDE / 2}" y="{bottom + 32}" text-anchor="middle">measured</text>',
        f'<text x="{_LEFT}" y="{_TOP - 8}">simulated (grey lines: 10 % off)</text>',
    ]
    for factor in (1 / 1.1, 1.0, 1.1):
        shift = math.log10(factor) / (high - low) * _SIDE
        first, last = max(0.0, -shift), min(_SIDE, _SIDE - shift)
        parts.append(
            f'<line x1="{_LEFT + first:.1f}" y1="{bottom - first - shift:.1f}" x2="{_LEFT + last:.1f}" '
            f'y2="{bottom - last - shift:.1f}" stroke="{"#999" if factor == 1 else "#ddd"}"/>'
        )
    for ten in range(math.ceil(low), math.floor(high) + 1):
        at = place(10.0**ten)
        parts.append(
            f'<text x="{_LEFT + at:.1f}" y="{bottom + 15}" text-anchor="middle">{10.0**ten:g}</text>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{bottom - at + 4:.1f}" text-anchor="end">{10.0**ten:g}</text>'
        )
    for dot in sorted(dots, key=lambda dot: dot.kind != "other"):
        x, y = _LEFT + place(dot.measured_s), bottom - place(dot.simulated_s)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_COLOURS[dot.kind]}" opacity="0.8"/>')
    words = {"session": "a session's batch", "taken": "a sum, as it is taken", "other": "by other strategies"}
    for number, kind in enumerate(words):
        y = _TOP + 16 + 15 * number
        parts.append(f'<circle cx="{_LEFT + 12}" cy="{y - 4}" r="4" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{_LEFT + 22}" y="{y}">{words[kind]}</text>')
    return parts


def _bars(bars: Sequence[Bar]) -> list[str]:
    longest = max(bar.step_s for bar in bars)
    heading = "1,000 machines in 50 homes: seconds of a batch (dark: computing)"
    parts = [f'<text x="{_LEFT + _SIDE + 40}" y="20" class="title">{heading}</text>']
    for number, bar in enumerate(bars):
        y = _TOP + number * 2 * _BAR
        whole, busy = (seconds / longest * _LONGEST for seconds in (bar.step_s, bar.computing_s))
        parts += [
            f'<text x="{_BARS_LEFT - 8}" y="{y + 15:.0f}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect x="{_BARS_LEFT}" y="{y:.0f}" width="{whole:.1f}" height="{_BAR}" fill="#9ecae1"/>',
            f'<rect x="{_BARS_LEFT}" y="{y:.0f}" width="{busy:.1f}" height="{_BAR}" fill="#08519c"/>',
            f'<text x="{_BARS_LEFT + whole + 6:.1f}" y="{y + 15:.0f}">{bar.step_s:.1f}</text>',
        ]
    return parts
