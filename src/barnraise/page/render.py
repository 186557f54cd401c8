"""Templates of the page: every value is made printable and escaped. Pure but for reading the templates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from math import inf
from typing import Any

import jinja2
from markupsafe import Markup

from barnraise.agent_client.run_requests import RunRow
from barnraise.core.sanitize import printable
from barnraise.core.units import format_duration, format_rate, format_size
from barnraise.display.charts.bars import draw_phases
from barnraise.display.charts.elements import Element, markup
from barnraise.display.charts.network import draw_network
from barnraise.display.charts.timeline import draw_timeline
from barnraise.display.losses import loss_summary
from barnraise.display.row_view import run_state
from barnraise.history.sentences import counted, duration, plan_reason
from barnraise.history.view import RunView
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


def render_parts(view: RunView, base: str) -> Mapping[str, str]:
    """Return the parts of a run's page, and the data of its chart. ``base``: start of addresses."""
    shown = {
        "base": base,
        "view": view,
        "charts": _charts(view),
        "losses": loss_summary(view),
        "slowest_links": sorted(view.links, key=lambda link: link.mbps or inf)[:MOST_LINKS],
        "events": tuple(reversed(view.events[-MOST_EVENTS:])),
    }
    parts = {name: render(f"sections/{name}.html", **shown) for name in SECTIONS}
    return {**parts, CHART: chart_data(view)}


def _charts(view: RunView) -> dict[str, list[Markup]]:
    """Return each chart twice: for wide windows and for narrow ones."""
    drawn = {name: [draw(view, width=width) for width in _WIDTHS] for name, draw in _CHARTS.items()}
    return {
        name: [Markup(markup(each)) for each in pictures]  # noqa: S704  # elements escape their texts
        for name, pictures in drawn.items()
    }


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
