"""Details of a plan: the part of each machine, the traffic of each link and each level. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from barnraise.planning.cost.step_cost import StepCost, memory_needed
from barnraise.planning.cost.traffic_model import RouteFlow, flows, round_flows
from barnraise.planning.inputs.levels import Shape
from barnraise.planning.inputs.problem import PlanProblem
from barnraise.planning.plan.plans import LevelPlan, PlanPart, SlowestLink


def flows_of(problem: PlanProblem, price: StepCost) -> list[RouteFlow]:
    """Return all bytes of a step; for local SGD, those of a round divided by its steps."""
    raw = problem.model.gradient_bytes
    if price.kind != "local_steps":
        return flows(price.route, problem.payload(price.codec), raw)
    payload = problem.payload(price.codec)
    changed = round_flows(price.route, payload, 0.0 if price.shares_inside else raw)
    transfers = [flow._replace(size=flow.size / price.period) for flow in changed]
    for count, inner in zip(price.counts, price.inner, strict=True):
        for flow in flows(inner.route, problem.payload(problem.exact), raw):
            transfers.append(flow._replace(size=flow.size * count / price.period))
    return transfers


def slowest_link(problem: PlanProblem, carried: Iterable[RouteFlow]) -> SlowestLink | None:
    """Return the link on which a step's bytes take longest; None if there is no traffic."""
    totals: dict[tuple[int, int], float] = defaultdict(float)
    for flow in carried:
        totals[flow.source, flow.target] += flow.size
    rate = problem.links.rate
    slowest = max(totals, key=lambda pair: (totals[pair] / rate[pair[0]][pair[1]], pair), default=None)
    if slowest is None:
        return None
    source, target = slowest
    return SlowestLink(
        source=problem.names[source],
        target=problem.names[target],
        mbps=rate[source][target] * 8 / 1e6,
        bytes_per_step=totals[slowest],
    )


def parts_of(problem: PlanProblem, price: StepCost, carried: Iterable[RouteFlow]) -> tuple[PlanPart, ...]:
    """Return the part of each machine in a step."""
    sends: dict[int, float] = defaultdict(float)
    receives: dict[int, float] = defaultdict(float)
    for flow in carried:
        sends[flow.source] += flow.size
        receives[flow.target] += flow.size
    samples: dict[int, float] = {}
    steps: dict[int, int] = {}
    local = price.kind == "local_steps"
    if local:
        for count, inner in zip(price.counts, price.inner, strict=True):
            for member, share in zip(inner.group, inner.counts, strict=True):
                samples[member], steps[member] = share * count / price.period, count
    else:
        samples = dict(zip(price.group, map(float, price.counts), strict=True))
    memory = memory_needed(problem, price.codec, local=local, overlapped=price.overlapped)
    return tuple(
        PlanPart(
            name=problem.names[member],
            samples=samples[member],
            compute_s=samples[member] / problem.speeds[member],
            sends_bytes=sends[member],
            receives_bytes=receives[member],
            memory_bytes=memory,
            inner_steps=steps.get(member),
        )
        for member in price.group
    )


def levels_of(price: StepCost) -> tuple[LevelPlan, ...]:
    """Return the settings of each network level that the plan uses."""
    route, codec = price.route, price.codec.name
    if route.way == "none":
        return ()
    if route.way != "sites":
        return (LevelPlan(level="inside", codec=codec, period=price.period, all_reduce=route.way),)
    shared = price.shares_inside
    return (
        LevelPlan(
            level="inside",
            codec="exact",
            period=1 if shared else price.period,
            all_reduce=_inner_way(price) if shared else None,
            reduce=None if shared else route.reduce,
            broadcast=route.broadcast,
        ),
        LevelPlan(level="across", codec=codec, period=price.period, all_reduce=route.across),
    )


def _inner_way(price: StepCost) -> Shape | None:
    """Return the all-reduce shape of inner steps that most sites use."""
    ways: list[Shape] = [
        inner.route.way for inner in price.inner if inner.route.way != "none" and inner.route.way != "sites"
    ]
    return max(ways, key=ways.count, default=None)
