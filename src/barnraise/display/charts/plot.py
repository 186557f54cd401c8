"""Frame of a chart: margins, scales, axes, grid and lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from barnraise.display.charts.elements import Element, element
from barnraise.display.charts.scale import Scale

NARROW = 480  # a chart below this width has fewer ticks
_CHAR, _BOLD_CHAR = 6.6, 8.0  # width of a letter at 12 px, on the wide side


@dataclass(frozen=True)
class Plot:
    """Area of a chart with its two scales; the y axis points up."""

    x: Scale
    y: Scale

    @property
    def is_narrow(self) -> bool:
        return self.x.end < NARROW

    def point(self, x: float, y: float) -> str:
        """Return the coordinates of two finite values."""
        return f"{self.x.place(x):.1f},{self.y.place(y):.1f}"


def text_width(text: str, *, is_bold: bool = False) -> float:
    """Estimate the width of a text at 12 px."""
    return (_BOLD_CHAR if is_bold else _CHAR) * len(text)


def shortened(words: str, letters: int) -> str:
    """Return a text that is cut with an ellipsis if it has more letters."""
    return words if len(words) <= letters else f"{words[: letters - 1]}…"


def text(x: float, y: float, words: str, kind: str = "", anchor: str | None = None) -> Element:
    """Return a text at a place. ``anchor``: ``middle`` or ``end``; without it the text starts there."""
    class_ = f"br-text {kind}".strip()
    return element("text", words, x=x, y=y, class_=class_, text_anchor=anchor)


def horizontal_axis(plot: Plot, labels: Sequence[tuple[float, str]]) -> Iterator[Element]:
    """Yield the base line and the labels below it; a label that would touch another one is left out."""
    base = plot.y.start
    yield element("line", x1=plot.x.start, x2=plot.x.end, y1=base, y2=base, class_="br-axis")
    free = -math.inf
    for value, label in labels:
        place, half = plot.x.place(value), text_width(label) / 2
        yield element("line", x1=place, x2=place, y1=base, y2=base + 4, class_="br-axis")
        at_end = place + half > plot.x.end + 8
        start = place - 2 * half if at_end else place - half
        if start >= free:
            yield text(place, base + 17, label, "br-quiet", "end" if at_end else "middle")
            free = start + 2 * half + 8


def vertical_axis(plot: Plot, labels: Iterable[tuple[float, str]]) -> Iterator[Element]:
    """Yield grid lines with their labels on the left."""
    for value, label in labels:
        place = plot.y.place(value)
        yield element("line", x1=plot.x.start, x2=plot.x.end, y1=place, y2=place, class_="br-grid")
        yield text(plot.x.start - 6, place + 4, label, "br-quiet", "end")


def lines(plot: Plot, points: Iterable[tuple[float, float]], kind: str) -> Iterator[Element]:
    """Yield a line through the points; it has a gap where a value is not finite."""
    run: list[str] = []
    for x, y in [*points, (0.0, math.nan)]:
        if math.isfinite(y):
            run.append(plot.point(x, y))
            continue
        if len(run) == 1:
            x_text, y_text = run[0].split(",")
            yield element("circle", cx=x_text, cy=y_text, r=1.5, class_=f"{kind} br-dot")
        elif run:
            yield element("polyline", points=" ".join(run), class_=kind)
        run = []
