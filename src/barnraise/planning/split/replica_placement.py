"""Placement of pipelines that train together: full replicas, and one pipeline of the other machines. Pure.

A machine that is strong enough for the whole model may train a part of the micro-batches alone, as a full
replica. The other machines together are one pipeline, if the model fits on them. The micro-batches are
divided so that all are done at the same time. Replicas are used only if a step is clearly shorter with them,
because they exchange the gradients of all that is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from barnraise.core.errors import RunError
from barnraise.core.units import format_duration
from barnraise.planning.plan.plans import listed
from barnraise.planning.split.placement import place_stages, predict_placement
from barnraise.planning.split.placement_search import estimate_passes
from barnraise.planning.split.split_problem import SplitProblem
from barnraise.planning.split.stage_placement import StagePlacement, held_parts
from barnraise.planning.split.stage_time import SplitStepTime

_CLEARLY = 0.95  # of the step without replicas


class PipelineTime(NamedTuple):
    """Estimated seconds of a pipeline for the first micro-batch of a step, and for each further one."""

    first_s: float
    next_s: float

    def of(self, batches: int) -> float:
        """Return the seconds of this many micro-batches."""
        return self.first_s + (batches - 1) * self.next_s if batches else 0.0


class SplitPlacement(NamedTuple):
    """Pipelines that train together, each on machines of its own. ``times``: of each, if there are several.

    ``why`` and ``why_spare``: sentences about machines with and without blocks.
    """

    pipelines: tuple[StagePlacement, ...]
    times: tuple[PipelineTime, ...] = ()
    why: tuple[str, ...] = ()
    why_spare: tuple[str, ...] = ()

    def pipeline_of(self, machine: int) -> int | None:
        """Return the number of a machine's pipeline; None if the machine has no blocks."""
        return next((place for place, each in enumerate(self.pipelines) if machine in each.order), None)

    def run_of(self, machine: int) -> tuple[int, int] | None:
        """Return the blocks of a machine; None if it has none."""
        pipeline = self.pipeline_of(machine)
        return None if pipeline is None else self.pipelines[pipeline].run_of(machine)

    def neighbours_of(self, machine: int) -> frozenset[int]:
        """Return the machines of the stages before and after that of a machine."""
        pipeline = self.pipeline_of(machine)
        if pipeline is None:
            return frozenset()
        order = self.pipelines[pipeline].order
        place = order.index(machine)
        return frozenset(order[max(0, place - 1) : place] + order[place + 1 : place + 2])

    def divide(self, batches: int) -> tuple[range, ...]:
        """Return the micro-batches of a step that each pipeline trains, so that all end early."""
        if len(self.pipelines) == 1:
            return (range(batches),)
        counts = [0] * len(self.pipelines)
        for _ in range(batches):
            chosen = min(
                range(len(counts)), key=lambda place: (self.times[place].of(counts[place] + 1), place)
            )
            counts[chosen] += 1
        ends = [sum(counts[: place + 1]) for place in range(len(counts))]
        return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def place_pipelines(problem: SplitProblem) -> SplitPlacement:
    """Return the pipelines with the shortest predicted step: one, or several if that is clearly shorter.

    Raise RunError if the model does not fit on all machines together.
    """
    single = place_stages(problem)
    best = SplitPlacement((single,), (), single.why, single.why_spare)
    if not problem.speeds:
        return best
    limit_s = _CLEARLY * predict_pipelines(problem, best).step_s
    for replicas in _possible_replicas(problem):
        candidate = _beside_replicas(problem, replicas)
        if candidate is not None:
            step_s = predict_pipelines(problem, candidate).step_s
            if step_s < limit_s:
                best, limit_s = candidate, step_s
    return best


def predict_pipelines(problem: SplitProblem, placement: SplitPlacement) -> SplitStepTime:
    """Return the predicted step; of several pipelines that of the slowest one, with their exchange."""
    shares = placement.divide(problem.batches)
    has_mirrors = len(placement.pipelines) == 1  # replicas mirror each other
    steps, busy = [], []
    for share, each in zip(shares, placement.pipelines, strict=True):
        if not share:
            busy += [0.0] * len(each.order)
            continue
        own = problem._replace(batches=len(share))
        step = predict_placement(own, each.order, each.runs, has_mirrors=has_mirrors)
        steps.append(step)
        busy += step.busy_s
    slowest = max(steps, key=lambda step: step.step_s)
    if has_mirrors:
        return slowest
    exchange_s = _exchange_seconds(problem, placement)
    why = f"the replicas exchange gradients for {format_duration(exchange_s)}"
    return slowest._replace(
        step_s=slowest.step_s + exchange_s,
        commit_s=slowest.commit_s + exchange_s,
        busy_s=tuple(busy),
        why=(*slowest.why, why),
    )


def _possible_replicas(problem: SplitProblem) -> list[list[int]]:
    """Return groups of machines that hold the whole model: the fastest, the two fastest, and so on."""
    count, speeds = len(problem.parts.blocks), problem.speeds
    strong = [
        number
        for number, machine in enumerate(problem.machines)
        if not machine.memory_bytes or problem.whole_bytes <= machine.memory_bytes
    ]
    strong.sort(key=lambda number: sum(speeds[number].passes(0, count, count)))
    return [strong[:size] for size in range(1, len(strong) + 1)]


def _beside_replicas(problem: SplitProblem, replicas: Sequence[int]) -> SplitPlacement | None:
    """Return the placement with these full replicas, and a pipeline of the rest; None if it is only one."""
    count = len(problem.parts.blocks)
    need = problem.whole_bytes
    pipelines = [StagePlacement((number,), ((0, count),), needs=(need,)) for number in replicas]
    rest = [number for number in range(len(problem.machines)) if number not in replicas]
    why_spare = [
        f"{problem.machines[number].name} computes no blocks, because the model does not fit on the machines "
        "beside the full replicas; it takes over if another machine is lost"
        for number in rest
    ]
    if rest:
        try:
            placed = place_stages(problem.only(rest))
        except RunError:  # they are spares
            pass
        else:
            pipelines.append(placed._replace(order=tuple(rest[place] for place in placed.order)))
            why_spare = list(placed.why_spare)
    placement = SplitPlacement(tuple(pipelines), tuple(_time_of(problem, each) for each in pipelines))
    shares = placement.divide(problem.batches)
    if len(pipelines) < 2 or not all(shares):
        return None
    why = [
        line
        for each, share in zip(pipelines, shares, strict=True)
        for line in _reasons(problem, each, len(share))
    ]
    return placement._replace(why=tuple(why), why_spare=tuple(why_spare))


def _time_of(problem: SplitProblem, pipeline: StagePlacement) -> PipelineTime:
    return PipelineTime(*estimate_passes(problem, pipeline.order, pipeline.runs))


def _reasons(problem: SplitProblem, pipeline: StagePlacement, batches: int) -> list[str]:
    names = [problem.machines[number].name for number in pipeline.order]
    part = f"{batches} of {problem.batches} micro-batches"
    if len(names) == 1:
        return [f"{names[0]} is a full replica and trains {part}"]
    return [*pipeline.why, f"{listed(names)} are one pipeline and train {part}"]


def _exchange_seconds(problem: SplitProblem, placement: SplitPlacement) -> float:
    """Return the seconds in which each machine sends its gradients to those that have the same blocks."""
    longest_s = 0.0
    for own in placement.pipelines:
        for machine, (first, end) in zip(own.order, own.runs, strict=True):
            seconds = 0.0
            for other in placement.pipelines:
                for receiver, run in zip(other.order, other.runs, strict=True):
                    shared = max(first, run[0]), min(end, run[1])
                    if other is not own and shared[0] < shared[1]:
                        size = sum(part.trained_bytes for part in held_parts(problem.parts, *shared))
                        seconds += problem.links.transfer_s(machine, receiver, size)
                        seconds += problem.links.latencies[machine][receiver]
            longest_s = max(longest_s, seconds)
    return longest_s
