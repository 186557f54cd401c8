"""Plans as text for people: machines, a table, the chosen plan in words, and what would help. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from barnraise.cli.tables import table
from barnraise.cli.terminal import columns, wrapped
from barnraise.core.units import format_duration, format_size
from barnraise.planning import (
    ModelSize,
    NetworkPath,
    Plan,
    PlanAdvice,
    PlannedMachine,
    PlanRanking,
    StepTimes,
)
from barnraise.planning.inputs.levels import Sync
from barnraise.planning.plan.plans import listed

_MOST_ALLOWED = 8
_MOST_OTHERS = 4
_NARROW, _WIDE = 60, 120
_LEGEND = (
    "busy: the share of the time in which machines compute; slowest link: what it carries in a step; loss: "
    "how much higher it is expected to end."
)


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that is shown, as text, as a picture, or as one JSON object.

    ``basis`` says where speeds come from. After a dry run, ``together`` are the machines that took part,
    ``measured_step_s`` is a step of theirs, and ``predicted_step_s`` what it was without having tried.
    """

    model: ModelSize
    profile: StepTimes
    basis: str
    sync: Sync
    machines: tuple[PlannedMachine, ...]
    links: tuple[NetworkPath, ...]
    ranking: PlanRanking
    advice: tuple[PlanAdvice, ...]
    together: tuple[str, ...] = ()
    measured_step_s: float | None = None
    predicted_step_s: float | None = None
    is_calibrated: bool = False


class Shown(NamedTuple):
    """The plans that people see, the best first; ``others`` could be chosen if the user allowed it."""

    allowed: list[Plan]
    others: list[Plan]


def describe(answer: PlanReport, width: int = 0) -> str:
    """Format a report for people. ``width``: columns of the terminal; 0: detect them."""
    width = max(_NARROW, min(_WIDE, (width or columns()) - 1))
    ranking = answer.ranking
    shown = shown_plans(answer)
    blocks = [
        wrapped(_heading(answer), width),
        _machines(answer.machines, width),
        _plans(answer, shown, width),
    ]
    left = len(ranking.plans) - len(shown.allowed) - len(shown.others)
    legend = f"{_LEGEND} {left} more plans: --json" if left else _LEGEND
    blocks.append(wrapped(legend, width))
    blocks.append(wrapped(f"Chosen: {ranking.reason}", width))
    measured = compared(answer)
    if measured:
        blocks.append(wrapped(measured, width))
    if ranking.notes:
        blocks.append("\n".join(wrapped(f"note: {note}", width, "      ") for note in ranking.notes))
    lines = [wrapped(f"- {advice.sentence}", width, "  ") for advice in answer.advice]
    blocks.append("\n".join(["What would help:", *lines]) if lines else "Nothing that we know of would help.")
    return "\n\n".join(blocks)


def shown_plans(answer: PlanReport) -> Shown:
    """Choose the plans to show: the chosen one, the best single machine, all machines, the best others."""
    ranking = answer.ranking
    allowed = [plan for plan in ranking.plans if plan.is_allowed]
    largest = max(allowed, key=lambda plan: len(plan.parts))
    must = [ranking.chosen, ranking.best_alone, largest]
    kept = [*must, *(plan for plan in allowed if plan not in must)]
    room = max(_MOST_ALLOWED, len(dict.fromkeys(plan.name for plan in must)))
    names = list(dict.fromkeys(plan.name for plan in kept))[:room]
    others = [plan for plan in ranking.plans if not plan.is_allowed and not _is_held_back(plan)]
    return Shown([plan for plan in allowed if plan.name in names], others[:_MOST_OTHERS])


def why(answer: PlanReport, plan: Plan) -> str:
    """Explain in a few words what speaks for or against a plan."""
    phases = plan.phases
    if plan == answer.ranking.chosen:
        return "chosen"
    if not plan.is_allowed:
        return "with --sync auto"
    if plan.kind == "alone":
        return "sends nothing"
    if phases.waiting_s > phases.communication_s:
        return f"{phases.waiting_s / plan.step_s:.0%} waiting for the last"
    return f"{phases.communication_s / plan.step_s:.0%} communication"


def format_count(count: float) -> str:
    """Format a count such as ``124M`` or ``1.3G``."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def loss(plan: Plan) -> str:
    return "exact" if plan.is_exact else f"+{plan.quality.cost:.1%}"


def compared(answer: PlanReport) -> str:
    """Compare the steps of a dry run with the prediction for the same machines."""
    if answer.measured_step_s is None:
        return ""
    seconds = format_duration(answer.measured_step_s)
    text = f"Measured in the dry run with {listed(answer.together)}: {seconds} a step"
    if answer.predicted_step_s is None:
        return f"{text}."
    text += f"; the speeds and links alone predicted {format_duration(answer.predicted_step_s)}"
    return f"{text}. The figures above have learnt from it." if answer.is_calibrated else f"{text}."


def _is_held_back(plan: Plan) -> bool:
    return "Not proposed:" in plan.reason


def _heading(answer: PlanReport) -> str:
    model, profile = answer.model, answer.profile
    size = f"{format_count(model.parameters)} parameters, {format_size(model.gradient_bytes)} of gradients"
    batches = f"batches of {profile.batch:,} samples in micro-batches of {profile.unit_size:,}"
    return f"{size}; {batches}; {answer.basis}."


def _machines(members: Sequence[PlannedMachine], width: int) -> str:
    rows = [("machine", "samples/s", "how that is known")]
    rows += [(machine.name, _figure(machine.samples_per_s), machine.source) for machine in members]
    return table(rows, wraps=True, width=width)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plans(answer: PlanReport, shown: Shown, width: int) -> str:
    rows = [("", "a step", "speed-up", "busy", "slowest link", "loss", "why", "plan")]
    for plan in (*shown.allowed, *shown.others):
        link = plan.slowest_link
        rows.append(
            (
                "*" if plan == answer.ranking.chosen else "",
                format_duration(plan.step_s),
                f"{plan.speedup:.2f}x" if plan.speedup >= 0.01 else "<0.01x",
                f"{plan.utilisation:.0%}",
                "-" if link is None else format_size(link.bytes_per_step),
                loss(plan),
                why(answer, plan),
                plan.name,
            )
        )
    return table(rows, words=(6,), wraps=True, width=width)
