"""Parts of the screen, each drawn from the read model: machines, links, steps, events, plans. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from barnraise.cli.runs.progress.progress_line import (
    LinePart,
    format_speed,
    format_time_left,
    format_value,
    join_parts,
)
from barnraise.cli.tables import table
from barnraise.cli.watch.lines import Line, Span, Style, fitted, line, wrapped
from barnraise.cli.watch.snapshot import Snapshot
from barnraise.core.sanitize import printable
from barnraise.core.units import format_duration, format_size
from barnraise.display.losses import loss_summary
from barnraise.display.meanings import plan_title, recent_meaning
from barnraise.history.sentences import because, counted, duration, plan_reason
from barnraise.history.view import EventView, LinkView, MachineView, PhaseView, PlanView, RunView

OLD_SAMPLE_S = 60.0
_BAR = 24
_SHORT_BAR = 10
_GIB = 2.0**30
_MOST_LINKS = 12
_STATE_STYLES: dict[str, Style] = {
    "trains": "good",
    "joining": "warning",
    "paused": "warning",
    "died": "error",
    "evicted": "error",
    "ended": "faint",
}
_LEVEL_SIGNS = {"info": " ", "warning": "!", "error": "X"}
_LEVEL_STYLES: dict[str, Style] = {"info": "plain", "warning": "warning", "error": "error"}

Clock = Callable[[float], str]


def clock_time(at: float) -> str:
    """Return a time of this day as ``14:03:20``, and an earlier one with its date."""
    moment, now = datetime.fromtimestamp(at), datetime.now()
    return f"{moment:%H:%M:%S}" if moment.date() == now.date() else f"{moment:%m-%d %H:%M}"


def headline_lines(view: RunView, width: int) -> list[Line]:
    """Return the headline of a run in at most three lines, and what it has lost in at most two."""
    style: Style = "error" if view.state == "failed" else "strong"
    return [*wrapped(view.headline, width, style)[:3], *wrapped(loss_summary(view), width)[:2]]


def progress_line(view: RunView, width: int) -> Line:
    """Return how far the run is: a bar, the step, the metric, the speed and the remaining time.

    Where that is too long, the speed is left out first.
    """
    unit = "items" if view.counts == "item" else "samples"
    parts = []
    if view.total_steps:
        part = min(1.0, view.step / view.total_steps)
        size = _BAR if width >= 120 else _SHORT_BAR
        bar = "█" * round(part * size) + "░" * (size - round(part * size))
        parts.append(LinePart(f"{bar} {100 * part:.0f} %", 2))
    total = f" of {view.total_steps:,}" if view.total_steps is not None else ""
    parts.append(LinePart(f"{view.counts} {view.step:,}{total}", 9))
    curve = view.curve()
    if curve is not None and curve.newest is not None:
        parts.append(LinePart(f"{curve.name} {format_value(curve.newest)}", 4))
    if view.state != "running":
        if view.elapsed_s:
            parts.append(LinePart(f"took {duration(view.elapsed_s)}", 5))
    else:
        if view.samples_per_s:
            parts.append(LinePart(f"{format_speed(view.samples_per_s)} {unit}/s", 1))
        if view.eta_s is not None:
            parts.append(LinePart(f"{duration(view.eta_s)} left", 5))
    return line(join_parts(parts, width))


def machine_lines(snapshot: Snapshot, width: int, clock: Clock) -> list[Line]:
    """Return the table of machines. Measurements that are old are replaced by their time."""
    view = snapshot.view
    head = ["machine", "state", "device", "memory", "temp", "power", "load", "samples/s", "share"]
    if width >= 110:
        head.append("since")
    rows = [_machine_row(machine, view, clock)[: len(head)] for machine in view.machines]
    if not rows:
        return []
    used = [place for place in range(len(head)) if place < 2 or any(row[place] for row in rows)]
    cells = [tuple(row[place] for place in used) for row in (head, *rows)]
    texts = table(cells, words=[used.index(2)] if 2 in used else (), width=width).split("\n")
    styles: list[Style] = ["faint", *(_STATE_STYLES.get(machine.state, "plain") for machine in view.machines)]
    lines = [fitted(line(text, style), width) for text, style in zip(texts, styles, strict=True)]
    for machine in view.machines:
        reason = snapshot.user_pauses.get(machine.name, "")
        if reason and machine.state != "paused":
            lines += wrapped(f"{machine.name} is paused: {reason}", width, "warning", "  ")
    return lines


def _machine_row(machine: MachineView, view: RunView, clock: Clock) -> list[str]:
    age = view.at - (machine.sampled_at or view.at)
    is_old = view.state == "running" and age > OLD_SAMPLE_S and machine.state in ("trains", "joining")
    measured = [
        _memory(machine),
        f"{machine.temperature_c:.0f} °C" if machine.temperature_c is not None else "",
        f"{machine.power_w:.0f} W" if machine.power_w is not None else "",
        f"{100 * machine.load:.0f} %" if machine.load is not None and machine.state != "ended" else "",
        format_speed(machine.trained_per_s) if machine.trained_per_s else "",
    ]
    if machine.state in ("left", "died", "evicted", "refused"):
        measured = [""] * len(measured)
    elif is_old and machine.sampled_at is not None:
        measured = [f"as of {clock(machine.sampled_at)}", "", "", "", ""]
    return [
        machine.name,
        machine.state,
        machine.device,
        *measured,
        f"{100 * machine.share:.0f} %" if machine.share else "",
        clock(machine.since) if machine.since is not None else "",
    ]


def _memory(machine: MachineView) -> str:
    if machine.used_bytes is None:
        return format_size(machine.memory_bytes) if machine.memory_bytes else ""
    if not machine.memory_bytes:
        return format_size(machine.used_bytes)
    return f"{machine.used_bytes / _GIB:.1f}/{machine.memory_bytes / _GIB:.0f} GiB"


def link_lines(links: Sequence[LinkView], width: int) -> list[Line]:
    """Return the links between machines, the slowest first. Both directions share a row if they are alike."""
    rows: dict[tuple[str, str], tuple[str, str, str]] = {}
    for link in sorted(links, key=lambda link: (link.mbps is None, link.mbps or 0.0)):
        speed = f"{format_speed(link.mbps)} Mbit/s" if link.mbps is not None else ""
        trip = f"{link.rtt_ms:.3g} ms" if link.rtt_ms is not None else ""
        other = rows.get((link.target_node, link.source_node))
        if other is None or other[1] != speed:
            rows[link.source_node, link.target_node] = (f"{link.source} - {link.target}", speed, trip)
    if not rows:
        return []
    shown = [("", "speed", "round trip"), *list(rows.values())[:_MOST_LINKS]]
    used = [place for place in range(3) if place == 0 or any(row[place] for row in shown[1:])]
    cells = [tuple(row[place] for place in used) for row in shown]
    texts = table(cells, words=(0,), width=width).split("\n")
    more = [line(f"and {len(rows) - _MOST_LINKS} faster ones", "faint")] if len(rows) > _MOST_LINKS else []
    lines = [fitted(line(text, "plain" if place else "faint"), width) for place, text in enumerate(texts)]
    return [*lines, *more]


def phase_lines(view: RunView, width: int) -> list[Line]:
    """Return where the time of a step goes, beside what the plan predicted."""
    shown = [phase for phase in view.phases if (phase.measured_s or 0) > 0 or (phase.predicted_s or 0) > 0]
    if not shown:
        return []
    rows = [("", "measured", "predicted", "")]
    longest = max(phase.measured_s or 0.0 for phase in shown) or 1.0
    bar = _BAR if width >= 66 else _SHORT_BAR
    rows += [(*_phase_row(phase), "█" * round((phase.measured_s or 0.0) / longest * bar)) for phase in shown]
    rows.append(("together", _seconds(view.step_s), _seconds(view.predicted_step_s), ""))
    texts = table(rows, width=width).split("\n")
    lines = [fitted(line(text, "plain" if place else "faint"), width) for place, text in enumerate(texts)]
    recent = recent_meaning(view)
    return [*lines, *(wrapped(f"measured: {recent}", width, "faint") if recent else ())]


def _phase_row(phase: PhaseView) -> tuple[str, str, str]:
    return phase.name, _seconds(phase.measured_s), _seconds(phase.predicted_s)


def _seconds(value: float | None) -> str:
    return format_duration(value) if value is not None else "-"


def event_lines(events: Iterable[EventView], width: int, clock: Clock, most_lines: int) -> list[Line]:
    """Return events in words, in the given order. ``!`` marks warnings and ``X`` errors.

    ``most_lines``: of one event; the rest of its text is left out.
    """
    lines: list[Line] = []
    for event in events:
        start = f"{_LEVEL_SIGNS[event.level]} {clock(event.at)}  "
        step = f" (step {event.step:,})" if event.step is not None and event.kind != "checkpoint" else ""
        text = f"{start}{event.text}{step}"
        style = _LEVEL_STYLES[event.level]
        first, *rest = _hanging(text, width, len(start), most_lines)
        lines += [line(first, style), *(line(part, style) for part in rest)]
    return lines


def _hanging(text: str, width: int, indent: int, most_lines: int) -> list[str]:
    head, tail = text[:indent], printable(text[indent:])
    parts = textwrap.wrap(
        tail, max(20, width - indent), max_lines=most_lines, placeholder=" ...", break_on_hyphens=False
    )
    return [head + (parts[0] if parts else ""), *(" " * indent + part for part in parts[1:])]


def plan_lines(plans: Sequence[PlanView], width: int) -> list[Line]:
    """Return the plans, the newest first, with their reasons and what was measured under them."""
    lines: list[Line] = []
    for plan in reversed(plans):
        lines += wrapped(
            f"from step {plan.step:,}: {because(plan_title(plan), plan_reason(plan))}",
            width,
            indent="  ",
        )
        facts = [f"predicted {_seconds(plan.predicted_step_s)} a step"]
        if plan.measured_steps:
            steps = counted(plan.measured_steps, "step")
            facts.append(f"measured {_seconds(plan.measured_step_s)} (mean of {steps})")
        shares = [f"{name} {share:.0f}" for name, share in plan.shares.items()]
        facts += [f"expected samples of a step: {', '.join(shares)}"] if shares else []
        lines += wrapped("  " + "; ".join(facts), width, "faint", "  ")
    return lines


def fact_lines(view: RunView, width: int) -> list[Line]:
    """Return small facts: the newest checkpoint, energy, and gaps of the record."""
    facts = []
    if view.checkpoints:
        newest = view.checkpoints[-1]
        size = f", {format_size(newest.size_bytes)}" if newest.size_bytes else ""
        facts.append(f"newest checkpoint: step {newest.step:,} on {', '.join(newest.machines)}{size}")
    if view.energy_j:
        facts.append(f"energy: {view.energy_j / 3.6e6:.2f} kWh, as far as it was measured")
    if view.missing:
        facts.append(f"{view.missing:,} committed steps are in no log that is known here")
    return [row for fact in facts for row in wrapped(fact, width, "faint", "  ")]


def title_line(view: RunView, width: int, clock: Clock) -> Line:
    """Return which run this is."""
    began = f"started{f' on {view.start.started_by}' if view.start.started_by else ''}"
    when = f" {clock(view.started_at)}" if view.started_at is not None else ""
    age = format_time_left(view.elapsed_s)
    running = f", {age} ago" if view.state == "running" and view.started_at else ""
    spans = (
        Span(f"run {view.run}", "title"),
        *line(f"  {view.start.title}  {began}{when}{running}", "faint"),
    )
    return fitted(spans, width)
