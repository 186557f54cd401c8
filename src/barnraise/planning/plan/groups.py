"""Which groups of machines are worth a prediction. Pure.

Of up to eight machines, all. Of more, groups that grow by whoever makes a step shortest, begun with the
fastest machine and with that of each large site, and the sites themselves.
"""

from __future__ import annotations

from itertools import combinations

import numpy

from barnraise.planning.cost.rings import Costs
from barnraise.planning.cost.traffic_model import ring_piece, ring_seconds
from barnraise.planning.inputs.problem import MOST_SUBSETS, Group, PlanProblem

_STARTS = 3
_KEPT = 10


def worthwhile_groups(question: PlanProblem, usable: Group) -> list[Group]:
    """Groups of at least two of the usable machines, the larger ones first."""
    if question.count <= MOST_SUBSETS:
        sizes = range(len(usable), 1, -1)
        return [group for size in sizes for group in combinations(usable, size)]
    sites = [tuple(one for one in site if one in usable) for site in question.sites]
    largest = sorted((site for site in sites if site), key=lambda site: (-question.speed(site), site))
    starts = dict.fromkeys(
        max(group, key=lambda one: (question.speeds[one], -one)) for group in (usable, *largest[:_STARTS])
    )
    estimates: dict[Group, float] = {}
    for start in starts:
        for group, estimate in _grown(question, start, usable):
            estimates[group] = min(estimate, estimates.get(group, estimate))
    best = sorted(estimates, key=lambda group: (estimates[group], -question.speed(group), group))[:_KEPT]
    kept = dict.fromkeys((usable, *largest[:_STARTS], *best))
    return sorted((group for group in kept if len(group) > 1), key=lambda group: (-len(group), group))


def _grown(question: PlanProblem, start: int, usable: Group) -> list[tuple[Group, float]]:
    """Every group on the way from one machine to all, with an estimate of its exact step in a ring."""
    order = [start]
    left = [one for one in usable if one != start]
    size = question.payload(question.exact)
    speeds = numpy.array(question.speeds)
    found = []
    while left:
        machines = len(order) + 1
        hops = question.wires.hop_costs(question.everybody, ring_piece(size, machines))
        before = order[-1:] + order[:-1]
        kept = hops[before, order] if machines > 2 else numpy.zeros(1)
        # For each place and each machine that may stand there: the slowest hop of the ring.
        others = numpy.array(
            [
                max(kept[:place].tolist() + kept[place + 1 :].tolist(), default=0.0)
                for place in range(len(order))
            ]
        )
        slowest = numpy.maximum(hops[numpy.ix_(before, left)], hops[numpy.ix_(left, order)].T)
        slowest = numpy.maximum(slowest, others[:, numpy.newaxis])
        steps = _estimates(question, speeds[order].sum() + speeds[left], slowest.min(axis=0), machines)
        chosen = min(range(len(left)), key=lambda one: (steps[one], -speeds[left[one]], left[one]))
        order.insert(int(slowest[:, chosen].argmin()), left.pop(chosen))
        found.append((tuple(sorted(order)), float(steps[chosen])))
    return found


def _estimates(question: PlanProblem, speeds: Costs, hops_s: Costs, machines: int) -> Costs:
    """Of a step in groups of these speeds, whose rings have these slowest hops."""
    compute: Costs = question.profile.batch / speeds
    transfer = question.calibration.factor("every_step") * ring_seconds(1.0, machines, gathers=False) * hops_s
    visible: Costs = numpy.maximum(0.0, transfer - compute * question.profile.backward_share)
    return compute + visible
