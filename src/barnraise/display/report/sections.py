"""Sections of a report about how a run went: result, machines, time, losses. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from barnraise.core.units import format_size
from barnraise.display.charts.bars import draw_phases, draw_stacks
from barnraise.display.charts.curve import draw_curve, draw_rates
from barnraise.display.charts.elements import Element, element
from barnraise.display.charts.marks import SIGN_MEANINGS
from barnraise.display.charts.network import draw_network
from barnraise.display.charts.scale import short_number, short_seconds
from barnraise.display.charts.timeline import draw_timeline
from barnraise.display.report.accounting import machine_uses, step_sentences, time_parts
from barnraise.display.report.energy import EnergyPrice, energy_sentences, format_energy
from barnraise.display.report.layout import figure, paragraphs, section, table
from barnraise.history.sentences import because, duration, plan_reason
from barnraise.history.view import CurveView, RunView

_MOST_CURVES = 6
_MOST_ROWS = 300
_MOST_REASONS = 5
_USE = ("machine", "trained", "mean load", "most memory", "hottest", "mean power", "own speed", "share")
_STEP_TIMES = "Time of a step under each plan; measured: the median."


def result_section(view: RunView) -> Element:
    """Return the curve that counts with its marks, then the other logged values."""
    main = view.curve()
    if main is None:
        return section("Result", paragraphs(["The script logged no value, so there is no curve."]))
    others = [curve for curve in view.curves if curve is not main]
    rows = [(curve.name, _value(curve.newest), _value(curve.lowest)) for curve in (main, *others)]
    return section(
        f"Result: {main.name}",
        figure(
            lambda width: draw_curve(main, view.marks, width=width),
            f"Thin: as logged. Thick: smoothed. {SIGN_MEANINGS}",
        ),
        table(("value", "newest", "lowest"), rows[:_MOST_ROWS]),
        *(_small_curve(curve) for curve in others[: _MOST_CURVES - 1]),
    )


def _small_curve(curve: CurveView) -> Element:
    return figure(lambda width: draw_curve(curve, width=width, height=150), curve.name)


def machines_section(view: RunView) -> Element:
    """Return the times of each machine, the speed of all together, and the events of the machines."""
    marks = view.marks
    changes = [event for event in view.events if event.node and event.kind not in ("failure", "note")]
    rows = [
        (_since(view, event.at), "–" if event.step is None else f"{event.step:,}", event.text)
        for event in changes[:_MOST_ROWS]
    ]
    more = len(changes) - len(rows)
    return section(
        "Times of the machines",
        figure(lambda width: draw_timeline(view, width=width), "Time since the start of the run."),
        table(("time", "step", "what happened"), rows) if rows else _plain("No machine came or went."),
        _plain(f"{more:,} more changes are not shown.") if more > 0 else None,
        element("h3", "Speed of all machines together"),
        figure(
            lambda width: draw_rates(view.rates, marks, end=view.step, width=width),
            "Samples per second over the steps.",
        ),
    )


def time_section(view: RunView) -> Element:
    """Return where the time of the run went, and the use of each machine."""
    parts = time_parts(view)
    is_measured = bool(view.phase_totals_s)
    total = [("whole run", parts)]
    rows = [(name, short_seconds(seconds), _percent(seconds / view.elapsed_s)) for name, seconds in parts]
    uses = [
        (
            use.machine.name,
            f"{duration(use.trained_s)} ({_percent(use.trained_part)})",
            _percent(use.mean_load),
            "–" if use.most_bytes is None else format_size(use.most_bytes),
            "–" if use.highest_c is None else f"{use.highest_c:.0f} °C",
            "–" if use.mean_w is None else f"{short_number(use.mean_w)} W",
            _speed(use.machine.samples_per_s),
            _percent(use.machine.share) if use.machine.state in ("trains", "ended") else "–",
        )
        for use in machine_uses(view)
    ]
    return section(
        "Where the time went",
        figure(lambda width: draw_stacks(total, label="time of the run by phase", width=width))
        if is_measured
        else _plain("The times of the steps were not measured."),
        table(("part", "time", "of the run"), rows) if is_measured else None,
        element("h3", "Use of the machines"),
        table(_USE, uses),
        *(_plain(sentence) for sentence in _unmeasured(uses)),
    )


def _unmeasured(uses: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield what a dash means, and which columns are not shown."""
    columns = [[row[place] for row in uses] for place in range(len(_USE))]
    absent = [name for name, column in zip(_USE, columns, strict=True) if set(column) == {"–"}]
    if absent:
        yield f"Not measured on any machine: {', '.join(absent)}."
    if any("–" in column and set(column) != {"–"} for column in columns):
        yield "A dash: not measured on this machine."


def losses_section(view: RunView) -> Element:
    """Return what was lost and recovered, with each failure."""
    failures = [event for event in view.events if event.kind == "failure"]
    return section(
        "What was lost and recovered",
        paragraphs(step_sentences(view), "warning" if view.missing else None),
        *(
            element(
                "div",
                element("p", f"After {_since(view, event.at)}: {event.text}", class_="error"),
                element("pre", event.detail) if event.detail else None,
            )
            for event in failures[:20]
        ),
        _plain(f"{len(failures) - 20:,} more failures are not shown.") if len(failures) > 20 else None,
    )


def plans_section(view: RunView) -> Element:
    """Return each plan with its predicted and its measured time of a step."""
    if not view.plans:
        return section("Plan against reality", _plain("No plan was recorded."))
    rows = [
        (
            f"from {view.counts} {plan.step:,}",
            plan.sync,
            short_seconds(plan.predicted_step_s),
            short_seconds(plan.measured_step_s),
            _difference(plan.predicted_step_s, plan.measured_step_s),
        )
        for plan in view.plans[:_MOST_ROWS]
    ]
    return section(
        "Plan against reality",
        table(("plan", "how", "predicted", "measured", "difference"), rows, _STEP_TIMES),
        figure(
            lambda width: draw_phases(view.phases, width=width),
            "Where the time of a step goes: mean of the newest steps, and the prediction of the last plan.",
        ),
        *(
            part
            for plan in view.plans[-_MOST_REASONS:]
            for part in (
                element("h3", f"Plan from {view.counts} {plan.step:,}"),
                element("p", because(plan.name, plan_reason(plan))),
            )
        ),
    )


def checkpoints_section(view: RunView) -> Element:
    """Return each checkpoint with the machines that hold it."""
    rows = [
        (
            f"{checkpoint.step:,}",
            _since(view, checkpoint.at),
            "–" if checkpoint.size_bytes is None else format_size(checkpoint.size_bytes),
            ", ".join(checkpoint.machines),
        )
        for checkpoint in view.checkpoints[-_MOST_ROWS:]
    ]
    if not rows:
        return section("Checkpoints", _plain("No checkpoint was recorded."))
    return section("Checkpoints", table(("step", "time", "size", "machines that hold it"), rows))


def energy_section(view: RunView, price: EnergyPrice | None) -> Element:
    """Return the energy by machine, and an estimate of the cost."""
    rows = [(machine.name, format_energy(machine.energy_j)) for machine in view.machines]
    is_known = view.energy_j is not None
    return section(
        "Energy",
        paragraphs(energy_sentences(view, price)),
        table(("machine", "energy"), rows) if is_known else None,
    )


def network_section(view: RunView) -> Element:
    """Return the machines and the newest measurements of their links."""
    rows = [
        (
            f"{link.source} to {link.target}",
            "–" if link.mbps is None else f"{short_number(link.mbps)} Mbit/s",
            "–" if link.rtt_ms is None else f"{short_number(link.rtt_ms)} ms",
        )
        for link in view.links[:_MOST_ROWS]
    ]
    return section(
        "Machines and links",
        figure(lambda width: draw_network(view, width=width), "A dashed line is a slow link."),
        table(("link", "speed", "round trip"), rows) if rows else _plain("No link was measured."),
    )


def _plain(sentence: str) -> Element:
    return element("p", sentence, class_="quiet")


def _since(view: RunView, at: float) -> str:
    return "–" if view.started_at is None else duration(at - view.started_at)


def _value(value: float | None) -> str:
    return short_number(value, 5)


def _percent(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.0f} %"


def _speed(samples_per_s: float | None) -> str:
    return "–" if samples_per_s is None else f"{short_number(samples_per_s)} samples/s"


def _difference(predicted: float | None, measured: float | None) -> str:
    return "–" if not predicted or measured is None else f"{100 * (measured / predicted - 1):+.0f} %"
