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
_RANKS: dict[EventKind, int] = {"died": 0, "evicted": 0, "left": 0, "paused": 1, "rollback": 3, "plan": 4}
SIGN_MEANINGS = "▲ came or recovered   ▼ went or died   ‖ paused   ◆ new plan   ◀ rollback"


@dataclass(frozen=True)
class _Group:
    """Marks so close to each other that they are shown as one."""

    place: float
    marks: tuple[CurveMark, ...]

    @property
    def first(self) -> CurveMark:
        """Return the most important mark: a loss before a return, and a plan last."""
        return min(self.marks, key=lambda mark: _RANKS.get(mark.kind, 2))

    @property
    def label(self) -> str:
        """Return the text of the most important mark, and how many more there are."""
        mark = self.first
        words = mark.text.split(":", 1)[0].removesuffix(" and trains again")
        words = {"plan": "new plan", "rollback": f"back to step {mark.step:,}"}.get(mark.kind, words)
        more = f" +{len(self.marks) - 1}" if len(self.marks) > 1 else ""
        return shortened(words, _MOST_LETTERS - len(more)) + more


def draw_marks(plot: Plot, marks: Sequence[CurveMark], top: float) -> Iterator[Element]:
    """Yield a dashed line, a sign and a text for each mark. The texts are in rows from ``top`` on.

    The most important texts get room first. The title of a mark has the whole text.
    """
    groups = _groups(plot, marks)
    taken: list[list[tuple[float, float]]] = [[] for _ in range(ROWS)]
    rows: dict[int, int | None] = {}
    for number in sorted(range(len(groups)), key=lambda number: _RANKS.get(groups[number].first.kind, 2)):
        start, end = _extent(plot, groups[number])
        free = (
            row for row, parts in enumerate(taken) if all(end < low or start > high for low, high in parts)
        )
        rows[number] = row = next(free, None)
        if row is not None:
            taken[row].append((start, end))
    for number, group in enumerate(groups):
        yield element("g", *_mark(plot, group, top, rows[number]))


def _extent(plot: Plot, group: _Group) -> tuple[float, float]:
    """Return the ends of the sign with its text. A text that would be cut goes to the left of its sign."""
    width = text_width(group.label) + 20
    if group.place + width > plot.x.end + 10:
        return group.place + 6 - width, group.place + 6
    return group.place - 6, group.place - 6 + width


def _mark(plot: Plot, group: _Group, top: float, row: int | None) -> Iterator[Element]:
    sign_y = top + ROW * (ROWS if row is None else row) + 8
    kind, shape = _SIGNS.get(group.first.kind, _PLAN)
    yield element("title", "\n".join(mark.text for mark in group.marks[:20]))
    yield element("line", x1=group.place, x2=group.place, y1=sign_y, y2=plot.y.start, class_="br-mark")
    yield element(
        "path",
        d=shape,
        transform=f"translate({group.place:.1f} {sign_y:.1f})",
        class_=f"br-sign {kind}".strip(),
    )
    if row is not None:
        flips = _extent(plot, group)[0] < group.place - 6
        place, anchor = (group.place - 7, "end") if flips else (group.place + 7, None)
        yield text(place, sign_y + 4, group.label, "br-halo", anchor)


def _groups(plot: Plot, marks: Iterable[CurveMark]) -> list[_Group]:
    groups: list[_Group] = []
    for mark in sorted(marks, key=lambda mark: mark.step):
        place = plot.x.place(mark.step)
        if groups and place - groups[-1].place < _NEAR:
            groups[-1] = _Group(groups[-1].place, (*groups[-1].marks, mark))
        else:
            groups.append(_Group(place, (mark,)))
    return groups
