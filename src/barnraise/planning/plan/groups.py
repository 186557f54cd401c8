"""Groups of machines that are worth a prediction. Pure.

For up to eight machines these are all groups. For more, groups grow by the machine that makes a step
shortest. They start with the fastest machine and with the fastest one of each large site. The sites are
added.
"""

from __future__ import annotations

from itertools import combinations

import numpy

from barnraise.planning.cost.rings import Costs
from barnraise.planning.cost.traffic_model import ring_piece, ring_seconds
from barnraise.planning.inputs.problem import MAX_ALL_SUBSETS, Group, PlanProblem

_STARTS = 3
_KEPT_GROUPS = 10


def worthwhile_groups(problem: PlanProblem, usable: Group) -> list[Group]:
    """Return groups of at least two usable machines, larger ones first."""
    if problem.count <= MAX_ALL_SUBSETS:
        sizes = range(len(usable), 1, -1)
        return [group for size in sizes for group in combinations(usable, size)]
    sites = [tuple(member for member in site if member in usable) for site in problem.sites]
    largest = sorted((site for site in sites if site), key=lambda site: (-problem.speed(site), site))
    starts = dict.fromkeys(
        max(group, key=lambda member: (problem.speeds[member], -member))
        for group in (usable, *largest[:_STARTS])
    )
    estimates: dict[Group, float] = {}
    for start in starts:
        for group, estimate in _grow_group(problem, start, usable):
            estimates[group] = min(estimate, estimates.get(group, estimate))
    best = sorted(estimates, key=lambda group: (estimates[group], -problem.speed(group), group))[
        :_KEPT_GROUPS
    ]
    kept = dict.fromkeys((usable, *largest[:_STARTS], *best))
    return sorted((group for group in kept if len(group) > 1), key=lambda group: (-len(group), group))


def _grow_group(problem: PlanProblem, start: int, usable: Group) -> list[tuple[Group, float]]:
    """Return every group on the way from one machine to all, with an estimate of its exact ring step."""
    order = [start]
    remaining = [member for member in usable if member != start]
    size = problem.payload(problem.exact)
    speeds = numpy.array(problem.speeds)
    grown = []
    while remaining:
        machines = len(order) + 1
        hops = problem.links.hop_costs(problem.all_members, ring_piece(size, machines))
        before = order[-1:] + order[:-1]
        kept = hops[before, order] if machines > 2 else numpy.zeros(1)
        # For each position and each machine that may be put there: the slowest hop of the ring.
        others = numpy.array(
            [
                max(kept[:place].tolist() + kept[place + 1 :].tolist(), default=0.0)
                for place in range(len(order))
            ]
        )
        slowest = numpy.maximum(hops[numpy.ix_(before, remaining)], hops[numpy.ix_(remaining, order)].T)
        slowest = numpy.maximum(slowest, others[:, numpy.newaxis])
        steps = _estimates(problem, speeds[order].sum() + speeds[remaining], slowest.min(axis=0), machines)
        chosen = min(
            range(len(remaining)),
            key=lambda place: (steps[place], -speeds[remaining[place]], remaining[place]),
        )
        order.insert(int(slowest[:, chosen].argmin()), remaining.pop(chosen))
        grown.append((tuple(sorted(order)), float(steps[chosen])))
    return grown


def _estimates(problem: PlanProblem, speeds: Costs, hops_s: Costs, machines: int) -> Costs:
    """Return estimated step times of groups with these speeds and slowest ring hops."""
    compute: Costs = problem.profile.batch / speeds
    transfer = problem.calibration.factor("every_step") * ring_seconds(1.0, machines, gathers=False) * hops_s
    visible: Costs = numpy.maximum(0.0, transfer - compute * problem.profile.backward_share)
    return compute + visible
