"""Marks above a curve: what changed at which step, with a sign and a short text each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from barnraise.display.charts.elements import Element, element
from barnraise.display.charts.plot import Plot, shortened, text, text_width
from barnraise.history.view import CurveMark, EventKind

ROW = 15  # height of a row of texts
ROWS = 3
_NEAR = 7.0  # marks closer than this become one
_MOST_LETTERS = 22
_CAME = ("br-came", "M0,-4 L4,3 L-4,3 Z")
_WENT = ("br-went", "M0,4 L4,-3 L-4,-3 Z")
_HELD = ("br-held", "M-4,-4 H-1 V4 H-4 Z M1,-4 H4 V4 H1 Z")
_PLAN = ("", "M0,-4 L4,0 L0,4 L-4,0 Z")
_BACK = ("br-went", "M-4,0 L1,-4 V-1.2 H4 V1.2 H1 V4 Z")
_SIGNS: dict[EventKind, tuple[str, str]] = {
    "joined": _CAME,
    "resumed": _CAME,
    "recovered": _CAME,
    "left": _WENT,
    "evicted": _WENT,
    "died": _WENT,
    "paused": _HELD,
    "plan": _PLAN,
    "rollback": _BACK,
}
SIGN_MEANINGS = "▲ came or recovered   ▼ went or died   ‖ paused   ◆ new plan   ◀ rollback"


@dataclass(frozen=True)
class _Group:
    """Marks so close to each other that they are shown as one."""

    place: float
    marks: tuple[CurveMark, ...]

    @property
    def label(self) -> str:
        """Return the text of the most important mark: a change of the machines before a plan."""
        first = min(self.marks, key=lambda mark: mark.kind == "plan")
        words = first.text.split(":", 1)[0]
        more = f" +{len(self.marks) - 1}" if len(self.marks) > 1 else ""
        return shortened(words, _MOST_LETTERS - len(more)) + more


def draw_marks(plot: Plot, marks: Sequence[CurveMark], top: float) -> Iterator[Element]:
    """Yield a dashed line, a sign and a text for each mark. The texts are in rows from ``top`` on.

    A text without room is left out; the title of the mark has the whole text.
    """
    free = [0.0] * ROWS
    for group in _groups(plot, marks):
        label = group.label
        width = text_width(label) + 16
        left = min(group.place, plot.x.end + 10 - width)
        row = next((number for number, end in enumerate(free) if left >= end), None)
        sign_y = top + ROW * (ROWS if row is None else row) + 8
        kind, shape = _SIGNS.get(min(group.marks, key=lambda mark: mark.kind == "plan").kind, _PLAN)
        parts = [
            element("title", "\n".join(mark.text for mark in group.marks[:20])),
            element("line", x1=group.place, x2=group.place, y1=sign_y, y2=plot.y.start, class_="br-mark"),
            element(
                "path",
                d=shape,
                transform=f"translate({group.place:.1f} {sign_y:.1f})",
                class_=f"br-sign {kind}".strip(),
            ),
        ]
        if row is not None:
            free[row] = left + width + 4
            flips = left < group.place - 1
            parts.append(
                text(
                    group.place - 7 if flips else left + 7, sign_y + 4, label, anchor="end" if flips else None
                )
            )
        yield element("g", *parts)


def _groups(plot: Plot, marks: Iterable[CurveMark]) -> list[_Group]:
    groups: list[_Group] = []
    for mark in sorted(marks, key=lambda mark: mark.step):
        place = plot.x.place(mark.step)
        if groups and place - groups[-1].place < _NEAR:
            groups[-1] = _Group(groups[-1].place, (*groups[-1].marks, mark))
        else:
            groups.append(_Group(place, (mark,)))
    return groups
