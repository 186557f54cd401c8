"""Templates of the page: every value is made printable and escaped. Pure but for reading the templates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from math import inf
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from barnraise.agent_client.run_requests import RunRow
from barnraise.core.sanitize import printable
from barnraise.core.units import format_duration, format_rate, format_size
from barnraise.display.charts.bars import draw_phases
from barnraise.display.charts.elements import Element, markup
from barnraise.display.charts.network import draw_network
from barnraise.display.charts.timeline import TIMELINE_MEANING, draw_timeline
from barnraise.display.losses import loss_summary
from barnraise.display.meanings import PHASE_MEANINGS, plan_title, recent_meaning, share_meaning
from barnraise.display.row_view import run_state
from barnraise.history.sentences import counted, duration, plan_reason
from barnraise.history.view import LinkView, MachineView, RunView
from barnraise.page.content.chart_data import chart_data
from barnraise.page.updates import CHART

UNKNOWN = "–"
SECTIONS = (
    "heading",
    "state",
    "machines",
    "timeline",
    "links",
    "time",
    "events",
    "plans",
    "checkpoints",
    "start",
)
MOST_EVENTS = 200
MOST_LINKS = 60
_MOST_TEXT = 4000


def render(template: str, **values: Any) -> str:
    """Return a page as HTML."""
    return _environment().get_template(template).render(**values)


class RunParts:
    """Parts of one run's page as HTML. A part is made again only if something that it shows has changed."""

    def __init__(self, base: str) -> None:
        """Keep the start of the page's addresses."""
        self._base = base
        self._kept: dict[str, tuple[object, str]] = {}
        self._rows: dict[tuple[str, str], tuple[object, Markup]] = {}  # by node and name of a machine

    def render(self, view: RunView) -> Mapping[str, str]:
        """Return all parts, and the data of the chart."""
        today = _moment(time.time()).date()  # times of other days are shown with their day
        rows = self._machine_rows(view)
        machines = tuple(
            (each.node, each.name, each.state, each.state_reason, each.device) for each in view.machines
        )
        contents: dict[str, object] = {
            "heading": (view.run, view.start),
            "machines": (rows, share_meaning(view)),
            "links": (view.links, machines),
            "events": (view.events, view.counts, today),
            "plans": (view.plans, view.counts, today),
            "checkpoints": (view.checkpoints, view.counts, today),
            "start": (view.run, view.start),
        }
        parts = {}
        for name in SECTIONS:
            content, kept = contents.get(name), self._kept.get(name)
            if content is None or kept is None or kept[0] != content:
                kept = content, _render_part(name, view, self._base, rows)
                self._kept[name] = kept
            parts[name] = kept[1]
        return {**parts, CHART: chart_data(view)}

    def _machine_rows(self, view: RunView) -> tuple[Markup, ...]:
        """Return the rows of the table of machines."""
        rows = {}
        for machine in view.machines:
            place = machine.node, machine.name
            content, kept = (_shown(machine), view.state, view.run), self._rows.get(place)
            if kept is None or kept[0] != content:
                html = render("sections/machine.html", machine=content[0], view=view)
                kept = content, Markup(html)  # noqa: S704  # rendered and escaped
            rows[place] = kept
        self._rows = rows
        return tuple(row for _, row in rows.values())


def _shown(machine: MachineView) -> MachineView:
    """Return a machine without what its row does not show, which changes often."""
    share = round(machine.share, 2) if machine.share is not None else None
    trained_per_s = float(f"{machine.trained_per_s:.3g}") if machine.trained_per_s is not None else None
    return msgspec.structs.replace(
        machine,
        share=share,
        trained_per_s=trained_per_s,
        samples_per_s=None,
        energy_j=None,
        load=None,
        since=None,
        sampled_at=None,
    )


def _render_part(name: str, view: RunView, base: str, rows: Sequence[Markup]) -> str:
    return render(
        f"sections/{name}.html",
        base=base,
        view=view,
        rows=rows,
        charts=_charts(name, view),
        slowest_links=_slowest(view) if name == "links" else (),
        losses=loss_summary(view) if name == "state" else "",
        recent=recent_meaning(view),
        share_meaning=share_meaning(view),
        phase_meanings=PHASE_MEANINGS,
        timeline_meaning=TIMELINE_MEANING,
        events=tuple(reversed(view.events[-MOST_EVENTS:])),
    )


def _slowest(view: RunView) -> Sequence[LinkView]:
    return sorted(view.links, key=lambda link: link.mbps or inf)[:MOST_LINKS]


def _charts(name: str, view: RunView) -> dict[str, list[Markup]]:
    """Return the chart of a part twice: for wide windows and for narrow ones."""
    if name not in _CHARTS:
        return {}
    pictures = [_CHARTS[name](view, width=width) for width in _WIDTHS]
    return {name: [Markup(markup(each)) for each in pictures]}  # noqa: S704  # elements escape their texts


def _draw_time(view: RunView, *, width: float) -> Element:
    return draw_phases(view.phases, width=width)


_WIDTHS = (720.0, 340.0)
_CHARTS: Mapping[str, Callable[..., Element]] = {
    "links": draw_network,
    "time": _draw_time,
    "timeline": draw_timeline,
}


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("barnraise.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "amount": _amount,
        "clock": _clock,
        "counted": counted,
        "date": _date,
        "first_capital": lambda text: f"{text[:1].upper()}{text[1:]}",
        "long": lambda seconds: UNKNOWN if seconds is None else duration(seconds),
        "percent": lambda share: UNKNOWN if share is None else f"{100 * share:.0f} %",
        "plan_reason": plan_reason,
        "plan_title": plan_title,
        "rate": lambda mbps: UNKNOWN if mbps is None else format_rate(1e6 * mbps),
        "run_state": _run_state,
        "short": lambda seconds: UNKNOWN if seconds is None else format_duration(seconds),
        "size": lambda count: UNKNOWN if count is None else format_size(count),
    }
    environment.globals |= {"unknown": UNKNOWN}
    return environment


def _printable(value: object) -> object:
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, also="\n\t", limit=_MOST_TEXT)
    return value


def _run_state(row: RunRow) -> str:
    """Return the state of a run in one word: its phase, or how it ended."""
    return row.phase if row.phase != "ended" else run_state(row)


def _amount(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 1000 and abs(value) < 1e12 else f"{value:.4g}"


def _clock(at: float | None) -> str:
    """Return the local time; with the day if it is not today."""
    if not at:
        return UNKNOWN
    moment = _moment(at)
    is_today = moment.date() == _moment(time.time()).date()
    return moment.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S")


def _date(at: float | None) -> str:
    return _moment(at).strftime("%Y-%m-%d %H:%M") if at else UNKNOWN


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(min(at, 4e9)).astimezone()
