"""Timeline of a run: which machine trained when, and the checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from barnraise.display.charts.elements import Element, element, svg
from barnraise.display.charts.plot import Plot, horizontal_axis, shortened, text, text_width
from barnraise.display.charts.scale import Scale, time_ticks
from barnraise.display.charts.spans import MachineSpan, machine_spans
from barnraise.history.sentences import counted, duration
from barnraise.history.view import RunView

MOST_ROWS = 24
_ROW, _BAR = 26, 16
_CLASSES = {"trains": "br-trains", "joining": "br-joining", "paused": "br-paused"}
_WORDS = {"refused": "takes no part", "left": "left", "evicted": "evicted", "died": "dead"}


def draw_timeline(view: RunView, *, width: float = 720) -> Element:
    """Return one row for each machine, with its states in words, and one for the checkpoints."""
    label = f"times of {counted(len(view.machines), 'machine')}"
    spans = machine_spans(view)
    if not spans or view.started_at is None:
        return svg(width, 40, label, text(8, 24, "no machine is known", "br-quiet"))
    machines = view.machines[:MOST_ROWS]
    left = min(130.0, 14 + max(text_width(machine.name[:16]) for machine in machines))
    left = max(left, text_width("checkpoints") + 14 if view.checkpoints else 0)
    rows = len(machines) + bool(view.checkpoints)
    end = max(view.ended_at if view.ended_at is not None else view.at, view.started_at + 1)
    bottom = rows * _ROW + 8
    plot = Plot(Scale(view.started_at, end, left, width - 14), Scale(0, 1, bottom, 0))
    parts: list[Element] = []
    for row, machine in enumerate(machines):
        parts.append(text(left - 8, row * _ROW + 20, shortened(machine.name, 16), anchor="end"))
        parts.extend(_preparation(plot, spans[machine.node][:1], row * _ROW + 8))
        for span in spans[machine.node]:
            parts.extend(_bar(plot, span, row * _ROW + 8, machine.name))
    if view.checkpoints:
        parts.extend(_checkpoints(plot, view, len(machines) * _ROW + 8))
    parts.extend(horizontal_axis(plot, _times(view.started_at, end - view.started_at, plot)))
    height = bottom + 24
    if len(view.machines) > MOST_ROWS:
        more = f"and {counted(len(view.machines) - MOST_ROWS, 'more machine')}"
        parts.append(text(8, height + 10, more, "br-quiet"))
        height += 18
    return svg(width, height, label, *parts)


def _times(start: float, span_s: float, plot: Plot) -> Sequence[tuple[float, str]]:
    ticks = time_ticks(span_s, 4 if plot.is_narrow else 8)
    return [(start + tick, duration(tick)) for tick in ticks]


def _bar(plot: Plot, span: MachineSpan, top: float, name: str) -> Iterator[Element]:
    start, end = plot.x.place(span.start), plot.x.place(span.end)
    word = _WORDS.get(span.state, span.state)
    title = element("title", f"{name}: {word} for {duration(span.end - span.start)}")
    kind = _CLASSES.get(span.state, "br-away")
    yield element(
        "rect",
        title,
        x=start,
        y=top if kind != "br-away" else top + _BAR / 2,
        width=max(1.0, end - start),
        height=_BAR if kind != "br-away" else 1,
        rx=2,
        class_=kind,
    )
    if text_width(word) + 8 < end - start and kind != "br-away":
        style = "br-on-bar" if span.state == "trains" else ""
        yield text(start + 5, top + 12, word, style)
    elif text_width(word) + 8 < end - start:
        yield text(start + 5, top + 4, word, "br-quiet")


def _preparation(plot: Plot, first: Sequence[MachineSpan], top: float) -> Iterator[Element]:
    """Yield the word for the time before a machine that trains from the first step on."""
    word = "prepares"
    if (
        first
        and first[0].state == "trains"
        and plot.x.place(first[0].start) > plot.x.start + text_width(word) + 8
    ):
        yield text(plot.x.start + 5, top + 12, word, "br-quiet")


def _checkpoints(plot: Plot, view: RunView, top: float) -> Iterator[Element]:
    yield text(plot.x.start - 8, top + 12, "checkpoints", "br-quiet", "end")
    last = -10.0
    for checkpoint in view.checkpoints:
        place = plot.x.place(checkpoint.at)
        if place - last < 3:
            continue
        last = place
        title = f"step {checkpoint.step} on {', '.join(checkpoint.machines[:8]) or 'no known machine'}"
        shape = f"M{place:.1f},{top + 3} l5,5 l-5,5 l-5,-5 Z"
        yield element("path", element("title", title), d=shape, class_="br-checkpoint")
