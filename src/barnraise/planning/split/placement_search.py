"""Search of the stages with the shortest step: which machines have blocks, in which order, how many. Pure.

The step of a pipeline is estimated as the time of one micro-batch through all stages and links. Each further
micro-batch adds the time of the slowest of them. The search goes from the last stage to the first. Partial
results with the same machines, first machine and blocks are compared in both times. What is not clearly
better in one of them is dropped. So is a partial result whose best rest could not clearly beat the best whole
result. So no estimate is shorter by more than a hundredth. With more than `MOST_EXACT` machines, or if there
are too many partial results, only the best ones of each number of stages are continued.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from barnraise.planning.split.split_problem import SplitProblem
from barnraise.planning.split.stage_placement import ModelParts, PartSize, stage_bytes
from barnraise.planning.split.stage_time import BlockSpeed

MOST_EXACT = 8  # machines
_WIDTHS = (30, 300)  # partial results of each number of stages that are continued at first
_MOST_LOOKS = 500_000  # about a second; a count, because all machines of a run must find the same
_CLEARLY = 0.001  # of the best estimate: what a result must be better by
_NEAR = 1.05  # of the best estimate: results that a simulation compares
_UNMEASURED = BlockSpeed(1 / 3, 2 / 3, after_s=1.0)  # the head of a small model takes as long as a block


class FoundStages(NamedTuple):
    """Stages of a pipeline. ``order``: the number of the machine of each; ``runs``: its blocks."""

    order: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    estimate_s: float


class _Partial(NamedTuple):
    """The last stages of a pipeline. ``mask``: of their machines. ``head``: the machine of the first one.

    ``first``: its first block. ``sum_s`` and ``most_s``: both times. ``bound_s``: what a whole step with them
    takes at least. ``rest``: the stages after the first one; None if there is no stage.
    """

    mask: int
    head: int
    first: int
    sum_s: float = 0.0
    most_s: float = 0.0
    bound_s: float = 0.0
    rest: _Partial | None = None

    def stages(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield machine and blocks of each stage."""
        if self.rest is not None:
            yield self.head, (self.first, self.rest.first)
            yield from self.rest.stages()


def find_stages(problem: SplitProblem, *, is_quick: bool = False) -> list[FoundStages]:
    """Return good stages by their estimates, the best ones first, at most one for each number of stages.

    The list is empty if the model does not fit on all machines together. If it ``is_quick``, only few partial
    results are continued.
    """
    search = _Search(problem)
    is_exact = len(problem.machines) <= MOST_EXACT
    for width in _WIDTHS[:1] if is_quick else (*_WIDTHS, *([None] if is_exact else [])):
        search.run(width)
    candidates = sorted(search.best.values(), key=lambda each: each.estimate_s)
    return [each for each in candidates if each.estimate_s <= _NEAR * candidates[0].estimate_s]


def estimate_passes(
    problem: SplitProblem, order: Sequence[int], runs: Sequence[tuple[int, int]]
) -> tuple[float, float]:
    """Return the estimated seconds of a micro-batch through all stages, and of the slowest stage or link."""
    links, speeds, count = _link_times(problem), problem.speeds, len(problem.parts.blocks)
    times = [sum(speeds[machine].passes(*run, count)) for machine, run in zip(order, runs, strict=True)]
    between = [links[a][b] for a, b in pairwise(order)]
    first_s = math.fsum((*times, *(link_s for link_s, _ in between)))
    return first_s, max(*times, *(slower_s for _, slower_s in between), 0.0)


class _Search:
    """Search in one problem. ``best``: the best whole result by its number of stages."""

    def __init__(self, problem: SplitProblem) -> None:
        self.best: dict[int, FoundStages] = {}
        self._shortest_s, self._left = math.inf, 0
        self._count, self._more = len(problem.parts.blocks), problem.batches - 1
        self._everything = (1 << len(problem.machines)) - 1
        self._speeds = problem.speeds or [_UNMEASURED] * len(problem.machines)
        self._links = _link_times(problem)
        self._has_links = any(any(pair) for row in self._links for pair in row)
        count = len(problem.parts.blocks)
        moves = (machine.move_s or (0.0,) * count for machine in problem.machines)
        self._moves = [list(accumulate(each, initial=0.0)) for each in moves]
        self._alike = self._kinds(problem)
        self._room = _Room(problem)
        self._bounds: dict[tuple[int, int], _RestBound] = {}

    def run(self, width: int | None) -> None:
        """Search; with a ``width``, continue only that many partial results of each number of stages."""
        level = [_Partial(0, -1, self._count)]
        self._left = _MOST_LOOKS
        for stages in range(1, len(self._speeds) + 1):
            following: dict[tuple[int, int, int], list[_Partial]] = {}
            for partial in level:
                if partial.bound_s > self._limit_s:
                    continue
                for machine in self._choices(self._everything & ~partial.mask):
                    for longer in self._extend(partial, machine, stages):
                        if longer.first == 0:
                            self._note(longer, stages)
                        else:
                            key = (longer.mask, longer.head if self._has_links else -1, longer.first)
                            self._keep(following.setdefault(key, []), longer)
                if self._left < 0:
                    return
            level = [partial for partials in following.values() for partial in partials]
            if width is not None and len(level) > width:
                level = sorted(level, key=lambda partial: partial.bound_s)[:width]

    @property
    def _limit_s(self) -> float:
        """Return the time below which a result is clearly better than the best one."""
        return self._shortest_s * (1 - _CLEARLY)

    def _note(self, whole: _Partial, stages: int) -> None:
        known = self.best.get(stages)
        if known is None or whole.bound_s < known.estimate_s:
            order, runs = zip(*whole.stages(), strict=True)
            self.best[stages] = FoundStages(order, runs, whole.bound_s)
            self._shortest_s = min(self._shortest_s, whole.bound_s)

    def _keep(self, partials: list[_Partial], longer: _Partial) -> None:
        """Add a partial result to others with the same machines and blocks, if it is clearly better."""
        margin_s = _CLEARLY * longer.bound_s
        margins = margin_s, margin_s / max(1, self._more)
        for each in partials:
            if each.sum_s <= longer.sum_s + margins[0] and each.most_s <= longer.most_s + margins[1]:
                return
        partials[:] = [each for each in partials if each.sum_s < longer.sum_s or each.most_s < longer.most_s]
        partials.append(longer)

    def _choices(self, free: int) -> list[int]:
        """Return the machines of a mask, of those that are alike only the last one."""
        chosen = {kind: machine for machine, kind in enumerate(self._alike) if free >> machine & 1}
        return sorted(chosen.values(), reverse=True)

    def _extend(self, partial: _Partial, machine: int, stages: int) -> Iterator[_Partial]:
        """Yield the results with one more stage before the others, on this machine."""
        speed, end = self._speeds[machine], partial.first
        link_s, slower_s = self._links[machine][partial.head] if partial.rest is not None else (0.0, 0.0)
        mask, moves = partial.mask | 1 << machine, self._moves[machine]
        fixed_s = speed.around_s + (speed.after_s if end == self._count else 0.0)
        for first in self._room.firsts(machine, end, stages):
            self._left -= 1
            stage_s = fixed_s + (end - first) * speed.block_s + (0.0 if first else speed.before_s)
            sum_s = partial.sum_s + stage_s + link_s + moves[end] - moves[first]
            most_s = max(partial.most_s, stage_s, slower_s)
            bound_s = sum_s + self._more * most_s
            if bound_s > self._limit_s:
                return
            if first:
                bound_s = sum_s + self._rest_s(mask, first, most_s)
            if bound_s <= self._limit_s:
                yield _Partial(mask, machine, first, sum_s, most_s, bound_s, partial)

    def _rest_s(self, mask: int, blocks: int, most_s: float) -> float:
        """Return a lower bound of what the first blocks add to a step on the other machines."""
        key = mask, blocks
        if key not in self._bounds:
            free = [machine for machine in range(len(self._speeds)) if not mask >> machine & 1]
            can_fit = self._room.fits(free, blocks)
            times = [(self._speeds[machine].block_s, self._room.most_blocks(machine)) for machine in free]
            self._bounds[key] = _RestBound(sorted(times) if can_fit else [], blocks, self._more)
        return self._bounds[key].at(most_s)

    def _kinds(self, problem: SplitProblem) -> list[int]:
        """Return for each machine the first one that differs from it in nothing."""
        machines = range(len(self._speeds))

        def are_alike(a: int, b: int) -> bool:
            others = [machine for machine in machines if machine not in (a, b)]
            links = self._links
            return (
                (self._speeds[a], problem.machines[a].memory_bytes, self._moves[a])
                == (self._speeds[b], problem.machines[b].memory_bytes, self._moves[b])
                and links[a][b] == links[b][a]
                and all(links[a][other] == links[b][other] for other in others)
                and all(links[other][a] == links[other][b] for other in others)
            )

        return [
            next(first for first in machines if first == machine or are_alike(first, machine))
            for machine in machines
        ]


class _RestBound:
    """Lower bound of the times of some blocks on other machines: seconds of a block, and most blocks of each.

    If no stage takes longer than a limit, the fastest machines take as many blocks as it allows. The bound is
    the least sum over all limits, of the stages' times and of the limit for each further micro-batch. That
    sum is convex, and has its corners where the fastest machines are just filled. Another bound takes the
    most blocks into account.
    """

    def __init__(self, machines: Sequence[tuple[float, float]], blocks: int, more: int) -> None:
        self._times = [time for time, _ in machines]
        self._blocks, self._more = blocks, more
        self._best: tuple[float, float] = (math.inf, math.inf)  # the bound, and its limit
        rate = 0.0
        for number, time in enumerate(self._times, 1):
            rate += 1 / time
            self._best = min(self._best, ((number + more) * blocks / rate, blocks / rate))
        self._least_sum_s = math.fsum(time * count for time, count in _fill(machines, blocks))
        # A machine that is full leaves more to the others.
        left, self._least_limit_s = float(blocks), 0.0
        for time, room in sorted(machines, key=lambda machine: machine[0] * machine[1]):
            self._least_limit_s = left / rate if rate > 1e-12 else math.inf
            if self._least_limit_s <= time * room:
                break
            left, rate = left - room, rate - 1 / time

    def at(self, most_s: float) -> float:
        """Return the bound if another stage takes ``most_s`` already."""
        with_room = self._least_sum_s + self._more * max(most_s, self._least_limit_s)
        if most_s <= self._best[1]:
            return max(with_room, self._best[0])
        full = _fill([(time, most_s / time) for time in self._times], self._blocks)
        return max(with_room, math.fsum(time * count for time, count in full) + self._more * most_s)


def _fill(machines: Sequence[tuple[float, float]], blocks: float) -> Iterator[tuple[float, float]]:
    """Yield the time of a block and the blocks of each machine, if the first ones take all that they can."""
    for time, room in machines:
        count = min(blocks, room)
        yield time, count
        blocks -= count
    if blocks > 1e-9:
        yield math.inf, 1.0


class _Room:
    """Memory of the machines: which stages fit on each."""

    def __init__(self, problem: SplitProblem) -> None:
        self._problem, self._parts = problem, problem.parts
        self._memory = [machine.memory_bytes or math.inf for machine in problem.machines]
        columns = zip(*problem.parts.blocks, strict=True)
        self._sums = [list(accumulate(column, initial=0)) for column in columns]
        self._firsts: dict[tuple[int, int, int], Sequence[int]] = {}
        self._smallest = min((_bytes_of(block) for block in problem.parts.blocks), default=0)

    def most_blocks(self, machine: int) -> float:
        """Return how many blocks fit on a machine at most."""
        memory = self._memory[machine]
        return memory // self._smallest if self._smallest and memory < math.inf else math.inf

    def firsts(self, machine: int, end: int, stages: int) -> Sequence[int]:
        """Return the first blocks that a stage can have, from the last one on.

        ``end``: after its last block. ``stages``: how many there are from it to the end of the pipeline.
        """
        key = machine, end, stages
        if key not in self._firsts:
            count = len(self._parts.blocks)
            fitting = []
            for first in range(end - 1, -1, -1):
                is_whole = end - first == count
                if (
                    self._stage_bytes(first, end, 1 if is_whole else max(2, stages), stages)
                    > self._memory[machine]
                ):
                    if stages > 1 or is_whole:
                        break
                    continue  # the whole model on one machine needs less than a part of it with buffers
                fitting.append(first)
            self._firsts[key] = fitting
        return self._firsts[key]

    def fits(self, machines: Sequence[int], blocks: int) -> bool:
        """Return False if the first blocks do not fit on these machines, even in the smallest pieces."""
        held = PartSize(*(column[blocks] for column in self._sums))
        need = _bytes_of(self._parts.before) + _bytes_of(held)
        return need <= sum(self._memory[machine] for machine in machines)

    def _stage_bytes(self, first: int, end: int, total: int, from_end: int) -> int:
        parts, count = self._parts, len(self._parts.blocks)
        held = ModelParts(
            parts.before if first == 0 else PartSize(0),
            (PartSize(*(column[end] - column[first] for column in self._sums)),),
            parts.after if end == count else PartSize(0),
            parts.boundary_bytes,
            parts.tied_bytes if end - first == count else 0,
        )
        return self._problem._replace(parts=held).stage_bytes(0, 1, stages=total, place=total - from_end)


def _bytes_of(part: PartSize) -> int:
    """Return the memory that a part needs on any machine, without what a micro-batch keeps."""
    only = ModelParts(PartSize(0), (part._replace(activation_bytes=0),), PartSize(0))
    return stage_bytes(only, 0, 1, stages=1, place=0, batches=1)


def _link_times(problem: SplitProblem) -> list[list[tuple[float, float]]]:
    """Return for each pair what a micro-batch takes there and back, and the slower direction alone.

    Where no speed is known, links cannot be compared with computing.
    """
    links, size, machines = problem.links, problem.sent_bytes, range(len(problem.machines))
    if not problem.speeds:
        return [[(0.0, 0.0) for _ in machines] for _ in machines]
    table = []
    for a in machines:
        times = [(links.transfer_s(a, b, size), links.transfer_s(b, a, size)) for b in machines]
        delays = [links.latencies[a][b] + links.latencies[b][a] for b in machines]
        table.append([(sum(pair) + delay, max(pair)) for pair, delay in zip(times, delays, strict=True)])
    return table
