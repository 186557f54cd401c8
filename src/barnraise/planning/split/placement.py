"""Placement of a model's blocks: the stages with the shortest step, and why. Pure.

The best results of the search are compared by a simulation of the step. A machine without blocks is a spare:
it would make the steps longer, or no block fits into its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.core.errors import RunError
from barnraise.core.units import format_duration, format_size
from barnraise.planning.plan.stage_placement import StagePlacement, stage_bytes, whole_bytes
from barnraise.planning.plan.stage_time import (
    SplitStepTime,
    commit_seconds,
    predict_split_step,
    stage_times,
)
from barnraise.planning.split.placement_search import find_stages
from barnraise.planning.split.split_problem import SplitProblem

Run = tuple[int, int]


def place_stages(problem: SplitProblem) -> StagePlacement:
    """Return the stages with the shortest step.

    Raise RunError, with what is missing, if the model does not fit.
    """
    found = find_stages(problem)
    if not found:
        raise RunError(_what_is_missing(problem), hint="Add a machine, or take a smaller model.")
    chosen = found[0]
    if problem.speeds:
        chosen = min(found, key=lambda each: predict_placement(problem, each.order, each.runs).step_s)
    spares = [number for number in range(len(problem.machines)) if number not in chosen.order]
    return StagePlacement(
        chosen.order,
        chosen.runs,
        tuple(_reasons(problem, chosen.order, chosen.runs)),
        tuple(_why_spare(problem, chosen.order, number) for number in spares),
    )


def predict_placement(problem: SplitProblem, order: Sequence[int], runs: Sequence[Run]) -> SplitStepTime:
    """Return the predicted step of stages on machines whose speeds are known."""
    parts, links = problem.parts, problem.links
    names = [machine.name for machine in problem.machines]
    stages = stage_times(runs, order, names, problem.speeds, links, problem.sent_bytes)
    commit_s = commit_seconds(parts, runs, order, links)
    return predict_split_step(stages, problem.batches, problem.order, commit_s)


def _what_is_missing(problem: SplitProblem) -> str:
    parts, machines = problem.parts, problem.machines
    need = whole_bytes(parts, problem.batches)
    memory = sum(machine.memory_bytes for machine in machines)
    names = ", ".join(f"{machine.name} {format_size(machine.memory_bytes)}" for machine in machines)
    if need > memory:
        more = format_size(need - memory)
        return f"the model needs {format_size(need)}, which is {more} more than all have: {names}"
    largest = max(parts.blocks, key=lambda part: part.frozen_bytes)
    return (
        f"the model needs {format_size(need)}, in parts that do not fit on these machines in any order: "
        f"{names}; a block has {format_size(largest.frozen_bytes)}"
    )


def _reasons(problem: SplitProblem, order: Sequence[int], runs: Sequence[Run]) -> list[str]:
    machines, parts, batches = problem.machines, problem.parts, problem.batches
    lines = []
    for place, (number, (first, end)) in enumerate(zip(order, runs, strict=True)):
        need = stage_bytes(parts, first, end, stages=len(runs), place=place, batches=batches)
        machine = machines[number]
        of = f" of {format_size(machine.memory_bytes)}" if machine.memory_bytes else ""
        lines.append(f"{machine.name} computes blocks {first + 1} to {end} and needs {format_size(need)}{of}")
    if len(machines) > 1 and not problem.speeds:
        lines.append("the machines' speeds are not measured yet, so they count as equal")
    return lines


def _why_spare(problem: SplitProblem, order: Sequence[int], number: int) -> str:
    machine, speeds = problem.machines[number], problem.speeds
    least = min(
        stage_bytes(problem.parts, block, block + 1, stages=2, place=1, batches=problem.batches)
        for block in range(len(problem.parts.blocks))
    )
    if machine.memory_bytes and least > machine.memory_bytes:
        why = f"a block needs {format_size(least)}, and it has {format_size(machine.memory_bytes)}"
    elif speeds:
        fastest = min(order, key=lambda other: speeds[other].block_s)
        times = [format_duration(speeds[each].block_s) for each in (number, fastest)]
        faster = problem.machines[fastest].name
        why = f"a step is shorter without it: a block takes {times[0]} there, and {times[1]} on {faster}"
    else:
        why = "the others are enough"
    return f"{machine.name} computes no blocks, because {why}; it takes over if another machine is lost"
