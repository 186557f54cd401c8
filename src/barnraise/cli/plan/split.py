"""Report about a split model: which machine holds what, what travels, the predicted step, and its rivals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import click

from barnraise.agent_client.profile import PartBytes, SplitProfile
from barnraise.cli.plan.options import PlanOptions
from barnraise.cli.tables import table
from barnraise.cli.terminal import columns, wrapped
from barnraise.core.errors import RunError
from barnraise.core.units import counted, format_duration, format_rate, format_size
from barnraise.planning.plan.plans import listed
from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.split_rivals import Rival, SplitPrice, price_rivals, price_run, recommend
from barnraise.planning.split.stage_placement import ModelParts, PartSize
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates

_NARROW, _WIDE = 60, 120
_OTHERS = (
    "Weights in a computer's memory or on a disk need another program, such as DeepSpeed. The figures of "
    "these ways favour them: reading and sending are taken to overlap with computing."
)


class SplitReport(NamedTuple):
    """All that is shown, as text or as one JSON object. ``split``: None if the model does not fit.

    ``notes``: what the figures rest on, if they were not measured.
    """

    problem: SplitProblem
    batch: int
    split: SplitPrice | None
    why_not: str
    rivals: tuple[Rival, ...]
    recommendation: str
    notes: tuple[str, ...] = ()


def run_split(profile: SplitProfile, *, wishes: PlanOptions) -> int:
    """Show what the dry run of a split model has measured. Return 1 if the model does not fit."""
    if wishes.add or wishes.picture is not None:
        raise RunError(
            "--add and --picture do not work with a split model yet", hint="Use --dry-run without them."
        )
    return show_split(report_of(profile), as_json=wishes.as_json)


def show_split(report: SplitReport, *, as_json: bool) -> int:
    """Print a report on a split. Return 1 if the model does not fit."""
    click.echo(json.dumps(_as_object(report), indent=2) if as_json else describe_split(report))
    return 0 if report.split is not None else 1


def _as_object(report: SplitReport) -> dict[str, Any]:
    """Return the report as one JSON object."""
    problem, split = report.problem, report.split
    stages = [
        {
            "machine": stage.name,
            "pipeline": stage.pipeline,
            "micro_batches": stage.batches,
            "first_block": stage.run[0] + 1,
            "last_block": stage.run[1],
            "memory_bytes": stage.need,
            "busy_s": stage.busy_s,
        }
        for stage in (stages_of(problem, split) if split is not None else ())
    ]
    return {
        "batch": report.batch,
        "micro_batches": problem.batches,
        "sent_bytes": problem.sent_bytes,
        "machines": [
            {"name": machine.name, "memory_bytes": machine.memory_bytes, "block_s": machine.speed.block_s}
            for machine in problem.machines
        ],
        "stages": stages,
        "step": split.step._asdict() if split is not None else None,
        "why_not": report.why_not,
        "rivals": [rival._asdict() for rival in report.rivals],
        "recommendation": report.recommendation,
        "notes": list(report.notes),
    }


def report_of(profile: SplitProfile) -> SplitReport:
    """Place the model on the machines of a dry run, and price its rivals."""
    return report_of_problem(problem_of(profile), profile.batch)


def report_of_problem(problem: SplitProblem, batch: int) -> SplitReport:
    """Place the model on the machines, and price its rivals. ``batch``: samples of a step."""
    split, why_not = None, ""
    try:
        split = price_run(problem)
    except RunError as error:
        why_not = error.message
    rivals = price_rivals(problem)
    return SplitReport(
        problem=problem,
        batch=batch,
        split=split,
        why_not=why_not,
        rivals=rivals,
        recommendation=recommend(split, rivals),
    )


class ShownStage(NamedTuple):
    """Stage of a pipeline as it is shown. ``batches``: micro-batches of a step that pass through it."""

    name: str
    memory_bytes: int
    pipeline: int
    batches: int
    run: tuple[int, int]
    need: int
    busy_s: float


def stages_of(problem: SplitProblem, split: SplitPrice) -> list[ShownStage]:
    """Return the stages of all pipelines."""
    busy = iter(split.step.busy_s)
    return [
        ShownStage(
            problem.machines[number].name,
            problem.machines[number].memory_bytes,
            place + 1,
            batches,
            run,
            need,
            next(busy),
        )
        for place, (pipeline, batches) in enumerate(zip(split.pipelines, split.shares, strict=True))
        for number, run, need in zip(pipeline.order, pipeline.runs, pipeline.needs, strict=True)
    ]


def problem_of(profile: SplitProfile) -> SplitProblem:
    """Return the measured model, machines and links as the planner takes them."""
    parts = ModelParts(
        _size(profile.before),
        tuple(map(_size, profile.blocks)),
        _size(profile.after),
        profile.boundary_bytes,
        profile.tied_bytes,
    )
    machines = tuple(
        SplitMachine(
            worker.name,
            worker.memory_bytes,
            BlockSpeed(worker.forward_s, worker.backward_s, worker.before_s, worker.after_s, worker.around_s),
            worker.host_bytes,
            worker.host_rate,
        )
        for worker in profile.workers
    )
    links = LinkRates(profile.rates, profile.latencies)
    return SplitProblem(parts, machines, links, profile.batches, profile.sent_bytes, profile.order)


def describe_split(report: SplitReport, width: int = 0) -> str:
    """Format a report for people. ``width``: columns of the terminal; 0: detect them."""
    width = max(_NARROW, min(_WIDE, (width or columns()) - 1))
    blocks = [wrapped(_model(report.problem), width)]
    if report.split is None:
        blocks.append(wrapped(f"It cannot be split over these machines: {report.why_not}.", width))
    else:
        blocks.append(_stages(report.problem, report.split, width))
        blocks += [wrapped(f"{line[:1].upper()}{line[1:]}.", width) for line in report.split.why_spare]
        if len(report.split.machines) > 1:
            blocks.append(wrapped(_travel(report, report.split), width))
        if any(len(pipeline.order) > 1 for pipeline in report.split.pipelines):
            blocks.append(_links(report.problem, report.split, width))
        blocks.append(wrapped(_prediction(report, report.split), width))
    if report.rivals:
        blocks.append(_rivals(report.rivals, width))
        blocks.append(wrapped(_OTHERS, width))
    blocks.append(wrapped(report.recommendation, width))
    blocks += [wrapped(note, width) for note in report.notes]
    return "\n\n".join(blocks)


def _size(part: PartBytes) -> PartSize:
    return PartSize(part.frozen, part.trained, part.activations)


def _model(problem: SplitProblem) -> str:
    parts, count = problem.parts, len(problem.parts.blocks)
    need = problem.whole_bytes
    trained = sum(part.trained_bytes for part in (parts.before, *parts.blocks, parts.after))
    return (
        f"The model has {counted(count, 'block')}, which are its layers, and needs {format_size(need)} to "
        f"train; {format_size(trained)} of it are trained. When it is split, each machine holds and computes "
        "only a part of the blocks."
    )


def _stages(problem: SplitProblem, split: SplitPrice, width: int) -> str:
    rows = [("machine", "holds", "memory", "computes", "is busy")]
    for stage in stages_of(problem, split):
        of = f" of {format_size(stage.memory_bytes)}" if stage.memory_bytes else ""
        rows.append(
            (
                stage.name,
                _held(*stage.run, len(problem.parts.blocks)),
                f"{format_size(stage.need)}{of}",
                format_duration(stage.busy_s),
                f"{stage.busy_s / split.step.step_s:.0%}",
            )
        )
    return table(rows, words=(0,), width=width)


def _held(first: int, end: int, count: int) -> str:
    blocks = f"blocks {first + 1} to {end}" if end - first > 1 else f"block {end}"
    if end - first == count:
        return "the whole model"
    return f"the start, {blocks}" if first == 0 else f"{blocks}, the end" if end == count else blocks


def _travel(report: SplitReport, split: SplitPrice) -> str:
    problem, size = report.problem, report.problem.sent_bytes
    pieces = f"{counted(report.batch, 'sample')} in {problem.batches} pieces, called micro-batches"
    sentences = [f"A step trains {pieces}."]
    for pipeline, batches in zip(split.pipelines, split.shares, strict=True):
        names = [problem.machines[number].name for number in pipeline.order]
        if len(split.pipelines) > 1:
            how = "trains" if len(names) == 1 else "train together"
            sentences.append(f"{listed(names)} {how} {batches} of them.")
        if len(names) > 1:
            through = "the machines" if len(split.pipelines) == 1 else listed(names)
            sentences.append(
                f"Each piece goes through {through} in this order. What a machine has computed, "
                f"{format_size(size)} for each piece, goes to the next one, and as much comes back: "
                f"{format_size(batches * size)} each way in a step."
            )
    if len(split.pipelines) > 1:
        sentences.append("Then they exchange and add the gradients of what is trained.")
    return " ".join((*sentences, "The weights never travel."))


def _links(problem: SplitProblem, split: SplitPrice, width: int) -> str:
    rows = [("link", "speed", "one way", "sends for")]
    links = problem.links
    pairs = [
        (a, b, batches * problem.sent_bytes)
        for pipeline, batches in zip(split.pipelines, split.shares, strict=True)
        for a, b in pairwise(pipeline.order)
    ]
    for a, b, count in pairs:
        rate = min(links.rates[a][b], links.rates[b][a])
        seconds = max(links.transfer_s(a, b, count), links.transfer_s(b, a, count))
        rows.append(
            (
                f"{problem.machines[a].name} to {problem.machines[b].name}",
                format_rate(8 * rate) if rate else "unknown",
                format_duration(links.latencies[a][b]),
                format_duration(seconds) if rate else "-",
            )
        )
    return table(rows, words=(0,), width=width)


def _prediction(report: SplitReport, split: SplitPrice) -> str:
    step = split.step
    speed = report.batch / step.step_s if step.step_s else 0.0
    return f"Predicted: {step.sentence}. That is {speed:.3g} samples a second."


def _rivals(rivals: Sequence[Rival], width: int) -> str:
    rows = [("instead of this split", "a step", "why")]
    for rival in rivals:
        seconds = "-" if rival.step_s is None else format_duration(rival.step_s)
        rows.append((rival.name, seconds, rival.why))
    return table(rows, words=(0,), wraps=True, width=width)
