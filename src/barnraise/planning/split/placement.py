"""Placement of a model's blocks: the stages with the shortest step, and why. Pure.

The best results of the search are compared by a simulation of the step. The search knows nothing of the
exchange of gradients. So machines are left out after it, one by one, while that makes the step shorter. A
machine without blocks is a spare: it would make the steps longer, or no block fits into its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from barnraise.core.errors import RunError
from barnraise.core.units import format_duration, format_size
from barnraise.planning.split.move_cost import moving_seconds
from barnraise.planning.split.placement_search import find_stages
from barnraise.planning.split.split_problem import SplitProblem
from barnraise.planning.split.stage_placement import StagePlacement
from barnraise.planning.split.stage_time import (
    SplitStepTime,
    commit_seconds,
    predict_split_step,
    stage_times,
)

Run = tuple[int, int]
_NEAR = 1.05  # of the estimate: a step that the search has seen as it is


class _Stages(NamedTuple):
    """Stages with the time of a step: ``estimate_s`` of the search, and ``cost_s`` predicted, with moves."""

    order: tuple[int, ...]
    runs: tuple[Run, ...]
    estimate_s: float
    cost_s: float = 0.0


def place_stages(problem: SplitProblem) -> StagePlacement:
    """Return the stages with the shortest step, without memory for mirrors if they fit only so.

    Raise RunError, with what is missing, if the model does not fit.
    """
    chosen = _shortest(problem, range(len(problem.machines)))
    if chosen is None:
        without = problem._replace(has_mirrors=False)
        chosen = _shortest(without, range(len(problem.machines)))
        if chosen is None:
            raise RunError(_what_is_missing(without), hint="Add a machine, or take a smaller model.")
        problem = without
    needs = tuple(
        problem.stage_bytes(*run, stages=len(chosen.runs), place=place)
        for place, run in enumerate(chosen.runs)
    )
    spares = [number for number in range(len(problem.machines)) if number not in chosen.order]
    return StagePlacement(
        chosen.order,
        chosen.runs,
        tuple(_reasons(problem, chosen, needs)),
        tuple(_why_spare(problem, chosen.order, number) for number in spares),
        needs,
    )


def _shortest(problem: SplitProblem, allowed: Sequence[int]) -> _Stages | None:
    """Return the best stages on some machines; None if the model does not fit on them."""
    best = _best(problem, allowed)
    while best is not None and problem.speeds and len(best.order) > 1:
        if best.cost_s <= _NEAR * best.estimate_s:
            return best
        groups = [[each for each in best.order if each != number] for number in best.order]
        tried = [(_best(problem, group, is_quick=True), group) for group in groups]
        fewer = [(stages.cost_s, group) for stages, group in tried if stages is not None]
        if not fewer or min(fewer)[0] >= best.cost_s:
            return best
        shorter = _best(problem, min(fewer)[1])
        assert shorter is not None
        best = shorter
    return best


def _best(problem: SplitProblem, allowed: Sequence[int], *, is_quick: bool = False) -> _Stages | None:
    """Return the best of the search's results on some machines, by the predicted step."""
    stages = []
    for candidate in find_stages(problem.only(allowed), is_quick=is_quick):
        order = tuple(allowed[place] for place in candidate.order)
        cost_s = candidate.estimate_s
        if problem.speeds:
            cost_s = predict_placement(problem, order, candidate.runs).step_s
            cost_s += moving_seconds(problem, order, candidate.runs)
        stages.append(_Stages(order, candidate.runs, candidate.estimate_s, cost_s))
    if not problem.speeds:
        return stages[0] if stages else None
    return min(stages, key=lambda each: each.cost_s, default=None)


def predict_placement(
    problem: SplitProblem, order: Sequence[int], runs: Sequence[Run], *, has_mirrors: bool = True
) -> SplitStepTime:
    """Return the predicted step of stages on machines whose speeds are known."""
    parts, links = problem.parts, problem.links
    names = [machine.name for machine in problem.machines]
    stages = stage_times(runs, order, names, problem.speeds, links, problem.sent_bytes)
    commit_s = commit_seconds(parts, runs, order, links, has_mirrors=has_mirrors and problem.has_mirrors)
    return predict_split_step(stages, problem.batches, problem.order, commit_s)


def _what_is_missing(problem: SplitProblem) -> str:
    parts, machines, need = problem.parts, problem.machines, problem.whole_bytes
    memory = sum(machine.memory_bytes for machine in machines)
    names = ", ".join(f"{machine.name} {format_size(machine.memory_bytes)}" for machine in machines)
    if need > memory:
        more = format_size(need - memory)
        return f"the model needs {format_size(need)}, which is {more} more than all have: {names}"
    largest = max(
        problem.stage_bytes(block, block + 1, stages=2, place=1) for block in range(len(parts.blocks))
    )
    return (
        f"the model needs {format_size(need)}, in parts that do not fit on these machines in any order: "
        f"{names}; a block needs {format_size(largest)}"
    )


def _reasons(problem: SplitProblem, chosen: _Stages, needs: Sequence[int]) -> list[str]:
    machines = problem.machines
    lines = []
    for number, (first, end), need in zip(chosen.order, chosen.runs, needs, strict=True):
        machine = machines[number]
        of = f" of {format_size(machine.memory_bytes)}" if machine.memory_bytes else ""
        lines.append(f"{machine.name} computes blocks {first + 1} to {end} and needs {format_size(need)}{of}")
    if len(machines) > 1 and not problem.speeds:
        lines.append("the machines' speeds are not measured yet, so they count as equal")
    elif problem.speeds:
        unknown = [machines[number].name for number in chosen.order if not machines[number].speed.block_s]
        lines += [f"the speed of {name} is not measured, so it counts as the slowest" for name in unknown]
    return lines


def _why_spare(problem: SplitProblem, order: Sequence[int], number: int) -> str:
    machine, speeds = problem.machines[number], problem.speeds
    smallest = min(
        problem.stage_bytes(block, block + 1, stages=2, place=1) for block in range(len(problem.parts.blocks))
    )
    if machine.memory_bytes and smallest > machine.memory_bytes:
        why = f"a block needs {format_size(smallest)}, and it has {format_size(machine.memory_bytes)}"
        return f"{machine.name} computes no blocks, because {why}"
    if not speeds:
        why = "the others are enough"
    elif machine.speed.block_s > max(speeds[other].block_s for other in order):
        fastest = min(order, key=lambda other: speeds[other].block_s)
        times = [format_duration(speeds[each].block_s) for each in (number, fastest)]
        faster = problem.machines[fastest].name
        why = f"a step is shorter without it: a block takes {times[0]} there, and {times[1]} on {faster}"
    else:
        why = "a step is shorter without it: its links take longer than its computing would save"
    return f"{machine.name} computes no blocks, because {why}; it takes over if another machine is lost"
