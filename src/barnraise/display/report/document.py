"""Document of a report: its head, its sections in order, and how to repeat the run. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from barnraise.core.units import format_size
from barnraise.display.charts.elements import Element, element
from barnraise.display.charts.scale import short_number
from barnraise.display.losses import loss_summary
from barnraise.display.report.energy import EnergyPrice, format_energy
from barnraise.display.report.layout import page, section, table, tiles
from barnraise.display.report.sections import (
    checkpoints_section,
    energy_section,
    losses_section,
    machines_section,
    network_section,
    plans_section,
    result_section,
    time_section,
)
from barnraise.history.sentences import counted, duration
from barnraise.history.view import RunView

_MOST_EVENTS = 500


@dataclass(frozen=True)
class ReportOptions:
    """Options of a report. ``made_at``: seconds since 1970; ``zone``: for times of day."""

    price: EnergyPrice | None = None
    made_at: float = 0.0
    zone: tzinfo = UTC
    version: str = ""


def build_report(view: RunView, options: ReportOptions) -> str:
    """Return the report of a run as the text of one HTML file."""
    return page(
        f"{view.run}: report",
        *_head(view, options),
        result_section(view),
        machines_section(view),
        time_section(view),
        losses_section(view),
        plans_section(view),
        checkpoints_section(view),
        energy_section(view, options.price),
        network_section(view),
        _environment_section(view),
        _repeat_section(view),
        _events_section(view, options),
        element(
            "footer",
            f"Made by Barnraise {options.version} at {_clock(options.made_at, options.zone)} "
            "from the record of the run. The file needs no other file.",
        ),
    )


def _head(view: RunView, options: ReportOptions) -> list[Element]:
    title = view.start.title or view.run
    started = _clock(view.started_at, options.zone)
    by = f" from {view.start.started_by}" if view.start.started_by else ""
    head: list[Element | None] = [
        element("h1", title),
        element("p", _sentence(view.headline), class_="lead"),
        element("p", summary) if (summary := loss_summary(view)) else None,
        element("p", f"Run {view.run}, started {started}{by}.", class_="quiet"),
    ]
    if view.state == "running":
        now = _clock(view.at, options.zone)
        head.append(element("p", f"The run has not ended. This report shows it at {now}.", class_="warning"))
    elif view.state == "failed":
        code = "" if view.exit_code is None else f" (exit code {view.exit_code})"
        reason = view.outcome or "no reason is known"
        head.append(element("p", f"The run failed{code}: {reason}", class_="error"))
    return [*(part for part in head if part is not None), tiles(_tiles(view))]


def _tiles(view: RunView) -> list[tuple[str, str]]:
    curve = view.curve()
    total = f" of {view.total_steps:,}" if view.total_steps not in (None, view.step) else ""
    mean = view.samples / view.elapsed_s if view.samples and view.elapsed_s else None
    pairs = [
        (f"{view.counts}s", f"{view.step:,}{total}"),
        ("time", duration(view.elapsed_s)),
        ("machines", f"{len(view.machines):,}"),
        ("samples", f"{view.samples:,}" if view.samples else "–"),
        ("samples/s, whole run", short_number(mean)),
    ]
    if curve is not None:
        pairs.insert(1, (f"newest {curve.name[:24]}", short_number(curve.newest, 4)))
        pairs.insert(2, (f"lowest {curve.name[:24]}", short_number(curve.lowest, 4)))
    if view.energy_j is not None:
        pairs.append(("energy, as measured", format_energy(view.energy_j)))
    return pairs


def _environment_section(view: RunView) -> Element:
    machines = [
        (
            machine.name,
            machine.device or "–",
            "–" if machine.memory_bytes is None else format_size(machine.memory_bytes),
            machine.system or "–",
        )
        for machine in view.machines
    ]
    versions = list(view.start.environment)
    return section(
        "Environment",
        table(("machine", "device", "memory", "system"), machines) if machines else None,
        table(("software", "version"), versions, "Software of the machine that started the run.")
        if versions
        else element("p", "The versions of the software were not recorded.", class_="quiet"),
    )


def _repeat_section(view: RunView) -> Element:
    if not view.start.command:
        return section("How to repeat it", element("p", "The command was not recorded.", class_="quiet"))
    resumed = view.start.resumes
    machines = ", ".join(machine.name for machine in view.machines[:20])
    return section(
        "How to repeat it",
        element("p", "In the folder of the script, on a machine of the same cluster:"),
        element("pre", view.start.command),
        element("p", f"It continued run {resumed}; that run's record has the steps before.")
        if resumed
        else None,
        element("p", f"Machines of this run: {machines}.", class_="quiet") if machines else None,
        table(("option", "value"), list(view.start.options)) if view.start.options else None,
    )


def _events_section(view: RunView, options: ReportOptions) -> Element:
    rows = [
        (
            _event_time(view, event.at, options.zone),
            "–" if event.step is None else f"{event.step:,}",
            event.text,
        )
        for event in view.events[-_MOST_EVENTS:]
    ]
    left_out = len(view.events) - len(rows)
    note = f"The first {counted(left_out, 'event')} are not shown." if left_out > 0 else ""
    zone = "" if view.started_at is None else _moment(view.started_at, options.zone, " (%Z)")
    return section("All events", table((f"time{zone}", view.counts, "event"), rows, note))


def _event_time(view: RunView, at: float, zone: tzinfo) -> str:
    """Return the time of day, with the date if it is not that of the start."""
    is_same_day = view.started_at is not None and _moment(at, zone, "%x") == _moment(
        view.started_at, zone, "%x"
    )
    return _moment(at, zone, "%H:%M:%S" if is_same_day else "%m-%d %H:%M:%S")


def _sentence(text: str) -> str:
    ending = "" if text.endswith((".", "!", "?")) else "."
    return text[:1].upper() + text[1:] + ending


def _clock(at: float | None, zone: tzinfo) -> str:
    return "–" if at is None else _moment(at, zone, "%Y-%m-%d %H:%M:%S %Z")


def _moment(at: float, zone: tzinfo, form: str) -> str:
    """Return a time in a form of `strftime`; a time that no calendar has is a dash."""
    try:
        return datetime.fromtimestamp(at, zone).strftime(form)
    except (OverflowError, ValueError, OSError):
        return "–"
