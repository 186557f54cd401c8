"""Picture of a run for the output of a notebook cell: words, charts as images, machines. Pure.

Viewers of saved notebooks remove styles and inline SVG from output that they do not trust. So the charts are
images with a style of their own, and the words are readable without a style.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

from barnraise.core.sanitize import printable
from barnraise.core.units import format_size
from barnraise.display.charts.curve import draw_curve
from barnraise.display.charts.elements import Element, element, markup, svg_file
from barnraise.display.charts.scale import short_number
from barnraise.display.charts.theme import CHART_STYLE, chart_style
from barnraise.display.charts.timeline import draw_timeline
from barnraise.display.losses import loss_summary
from barnraise.history.sentences import counted, duration
from barnraise.history.view import EventView, MachineView, RunView

_MOST_MACHINES = 16
_MOST_EVENTS = 6
_STALE_S = 15.0
_PAGE = "svg { background: var(--br-page); }"
_STYLE = f"""{chart_style(".br-run")}
.br-run {{ background: var(--br-page); color: var(--br-ink);
  border: 1px solid var(--br-line); border-radius: 8px;
  padding: 12px 16px; max-width: 760px; font: 14px/1.45 system-ui, sans-serif; }}
.br-run p {{ margin: 0 0 6px; overflow-wrap: anywhere; }}
.br-run img {{ display: block; width: 100%; height: auto; }}
.br-run .quiet {{ color: var(--br-quiet); font-size: 12px; }}
.br-run table {{ border-collapse: collapse; table-layout: auto !important; width: 100%;
  font-size: 12px; margin: 6px 0; }}
.br-run tr {{ background: none !important; }}
.br-run th, .br-run td {{ text-align: left !important; padding: 2px 8px 2px 0;
  border-bottom: 1px solid var(--br-line); color: var(--br-ink); background: none; }}
"""


def draw_picture(view: RunView, problem: str = "") -> str:
    """Return the picture as HTML. ``problem``: why it may be out of date."""
    curve = view.curve()
    box = element(
        "div",
        element("style", _STYLE),
        element("p", element("strong", view.start.title or view.run), f": {view.headline}"),
        element("p", summary) if (summary := loss_summary(view)) else None,
        element("p", " · ".join(figures(view)), class_="quiet"),
        _image(draw_curve(curve, view.marks, height=240), curve.name) if curve is not None else None,
        _image(draw_timeline(view), "times of the machines") if view.started_at is not None else None,
        _machines(view),
        *(element("p", _event(view, event), class_="quiet") for event in _newest_events(view)),
        element("p", _freshness(view, problem), class_="quiet"),
        class_="br-run",
    )
    return markup(box)


def plain_text(view: RunView) -> str:
    """Return the same in one line, for viewers that show text only."""
    return printable(f"{view.start.title or view.run}: {view.headline} ({', '.join(figures(view))})")


def waiting_picture(run: str, reason: str) -> str:
    """Return the picture before the first entry of a run is here."""
    box = element("div", element("style", _STYLE), element("p", f"{run}: {reason}"), class_="br-run")
    return markup(box)


def figures(view: RunView) -> Iterator[str]:
    """Yield the figures of a run, each with its name or unit."""
    total = f" of {view.total_steps:,}" if view.total_steps is not None else ""
    yield f"{view.counts} {view.step:,}{total}"
    curve = view.curve()
    if curve is not None:
        yield f"{curve.name} {short_number(curve.newest, 4)}"
    if view.ended_at is None and view.samples_per_s:
        yield f"{short_number(view.samples_per_s)} samples/s"
    yield f"{duration(view.elapsed_s)} so far" if view.ended_at is None else duration(view.elapsed_s)
    if view.eta_s is not None:
        yield f"about {duration(view.eta_s)} left"
    yield counted(len(view.machines), "machine")


def newest_entry(view: RunView) -> float | None:
    """Return the time of the newest step, measurement or event that the view shows."""
    times = [event.at for event in view.events[-1:]] + [rate.at for rate in view.rates[-1:]]
    times += [machine.sampled_at for machine in view.machines if machine.sampled_at is not None]
    return max(times, default=None)


def _newest_events(view: RunView) -> list[EventView]:
    """Return the newest events but checkpoints, which are in the chart."""
    return [event for event in view.events if event.kind != "checkpoint"][-_MOST_EVENTS:]


def _event(view: RunView, event: EventView) -> str:
    """Return when an event was, from the start on, and what happened."""
    return event.text if view.started_at is None else f"{duration(event.at - view.started_at)}: {event.text}"


def _machines(view: RunView) -> Element | None:
    if not view.machines:
        return None
    heading = ("machine", "state", "device", "share", "memory", "load", "power")
    rows = [_row(machine) for machine in view.machines[:_MOST_MACHINES]]
    shown = [column for column in range(len(heading)) if any(row[column] != "–" for row in rows)]
    more = len(view.machines) - len(rows)
    if more > 0:
        rows.append((f"and {counted(more, 'more machine')}", *[""] * (len(heading) - 1)))
    return element(
        "table",
        element("thead", element("tr", *(element("th", heading[column], scope="col") for column in shown))),
        element("tbody", *(element("tr", *(element("td", row[column]) for column in shown)) for row in rows)),
    )


def _row(machine: MachineView) -> tuple[str, ...]:
    return (
        machine.name,
        machine.state,
        machine.device or "–",
        "–" if machine.share is None else f"{100 * machine.share:.0f} %",
        "–" if machine.used_bytes is None else format_size(machine.used_bytes),
        "–" if machine.load is None else f"{100 * machine.load:.0f} %",
        "–" if machine.power_w is None else f"{short_number(machine.power_w)} W",
    )


def _freshness(view: RunView, problem: str) -> str:
    if problem:
        return f"Not up to date: {problem}"
    newest = newest_entry(view)
    if view.ended_at is not None or newest is None:
        return f"run {view.run}"
    silence = view.at - newest
    return f"run {view.run}" + (f"; nothing new for {duration(silence)}" if silence > _STALE_S else "")


def _image(picture: Element, label: str) -> Element:
    text = svg_file(picture, f"{CHART_STYLE}\n{_PAGE}")
    data = base64.b64encode(text.encode()).decode("ascii")
    return element("img", src=f"data:image/svg+xml;base64,{data}", alt=label)
