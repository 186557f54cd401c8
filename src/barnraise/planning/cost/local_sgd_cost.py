"""Cost of local SGD plans: the codec of a round's change, and its communication. Pure.

A worker is one machine, or the machines of one site that share every step. In a session a worker is always
one machine, even if the changes are reduced through sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from barnraise.planning.cost.local_sgd_period import (
    RoundWorkers,
    Times,
    busy_times,
    needed_period,
    round_of,
    smallest_period,
)
from barnraise.planning.cost.quality_model import LONGEST_PERIOD, local_quality, period_limit
from barnraise.planning.cost.route_search import RouteSearch
from barnraise.planning.cost.step_cost import StepCost, cost_alone, cost_step, fits, memory_needed, score
from barnraise.planning.cost.traffic_model import Route, Way, round_seconds
from barnraise.planning.inputs.codecs import PlanCodec, ladder
from barnraise.planning.inputs.levels import AUTO
from barnraise.planning.inputs.problem import Group, PlanProblem


class _Case(NamedTuple):
    """Group, route and inner steps of a plan, and how long rounds keep its workers busy.

    ``raw``: bytes of a machine's own change inside a site; 0 if the machines of a site share every step.
    """

    group: Group
    way: Way
    inner: tuple[StepCost, ...]
    busy: Times
    inner_batch: int
    fixed: int | None
    raw: float


def local_sgd_costs(problem: PlanProblem, router: RouteSearch, group: Group) -> list[StepCost]:
    """Return the costs of every codec, with and without overlap; a remark explains a rejected codec."""
    costs: list[StepCost] = []
    levels = problem.options.levels
    for way in _ways(problem, router, group):
        level = levels.across if way == "sites" else levels.inside
        if level.period == 1 or level.codec == problem.exact.name:
            continue
        is_flat = problem.options.is_flat
        sites = () if is_flat else router.route(group, way, problem.exact).sites
        workers = sites or tuple((member,) for member in group)
        batch = max(1, round(problem.profile.batch / len(workers)))
        inner = _inner_steps(problem, router, workers, batch)
        if inner is None:
            continue
        codecs = ladder(problem.options.codecs)
        if level.codec != AUTO:
            codecs = tuple(codec for codec in problem.options.codecs if codec.name == level.codec)
        busy = busy_times([price.step_s for price in inner])
        fixed = None if level.period == "auto" else level.period
        raw = problem.model.gradient_bytes if is_flat else 0.0
        case = _Case(group, way, inner, busy, batch, fixed, raw)
        for overlapped in (True, False):
            costs += _walk(problem, router, case, codecs, overlapped)
    return costs


def _ways(problem: PlanProblem, router: RouteSearch, group: Group) -> list[Way]:
    """Return the fastest of ring, star and tree; sites in addition, because its workers differ."""
    ways = router.encoded_ways(group)
    flat = [way for way in ways if way != "sites"]
    payload = problem.payload(problem.exact)

    def time(way: Way) -> float:
        return round_seconds(router.route(group, way, problem.exact), problem.links, payload)

    best = [min(flat, key=time)] if flat else []
    return best + [way for way in ways if way == "sites"]


def _walk(
    problem: PlanProblem, router: RouteSearch, case: _Case, codecs: Sequence[PlanCodec], overlapped: bool
) -> list[StepCost]:
    """Estimate the cost of every codec, and propose the one with the best score of speed and loss."""
    prices: list[StepCost] = []
    for codec in codecs:
        needed = memory_needed(problem, codec, local=True, overlapped=overlapped)
        if not fits(problem, case.group, needed):
            continue
        route = router.route(case.group, case.way, codec)
        price = _price(problem, case, route, codec, overlapped)
        # A codec that never keeps the machines busy is shown only if no codec does.
        if price is not None and (not price.remark or codec is codecs[-1]):
            prices.append(price)
    limit = period_limit(problem.model.parameters)
    best = max(prices, key=lambda price: score(price, problem.options.speed_per_loss), default=None)
    judged = []
    for price in prices:
        if price is not best and best is not None and case.fixed is None:
            why = f"Not proposed: {best.codec.name} is better when speed and expected loss are combined."
            price = price._replace(remark=why, is_proposed=False)
        elif case.fixed is None and price.period > limit:
            long = f"Rounds of {price.period} steps are longer than the recommended {limit}."
            price = price._replace(remark=price.remark or long)
        judged.append(price)
    return judged


def _price(
    problem: PlanProblem, case: _Case, route: Route, codec: PlanCodec, overlapped: bool
) -> StepCost | None:
    transfer = round_seconds(route, problem.links, problem.payload(codec), case.raw)
    if transfer == float("inf"):
        return None
    codec_s, overhead = problem.codec_s(codec), problem.profile.overhead_s
    factor = problem.calibration.factor("local_steps")
    steps = [price.step_s for price in case.inner]
    workers = RoundWorkers(steps, factor * transfer, codec_s + overhead, overlapped)
    target = problem.options.utilisation
    period = case.fixed or smallest_period(workers, target, case.busy)
    remark = ""
    if period is None:
        period = LONGEST_PERIOD
        needed = max(needed_period(workers, target), period + 1)
        remark = f"A utilisation of {target:.0%} needs rounds of at least {needed} steps."
    timing = round_of(workers, period)
    if timing is None:
        return None
    batch = case.inner_batch * len(steps)
    compute = batch / problem.speed(case.group)
    spare = max(0.0, timing.busy_s / period - compute - overhead)
    summed = sum(
        count * price.communication_s for count, price in zip(timing.counts, case.inner, strict=True)
    )
    inside = min(spare, summed / (period * len(steps)))
    return StepCost(
        kind="local_steps",
        group=case.group,
        route=route,
        codec=codec,
        counts=tuple(timing.counts),
        compute_s=compute,
        waiting_s=spare - inside,
        communication_s=inside + (timing.visible_s + codec_s) / period,
        overhead_s=overhead + overhead / period,
        transfer_s=transfer / period,
        hideable_s=timing.busy_s / 2 / period if overlapped else 0.0,
        last_share=0.0,
        codec_s=codec_s / period,
        quality=local_quality(
            problem.options.local_curve, codec, period, problem.model.parameters, len(steps)
        ),
        batch=batch,
        period=period,
        overlapped=overlapped,
        inner=case.inner,
        remark=remark,
        is_fixed=case.fixed is not None,
    )


def _inner_steps(
    problem: PlanProblem, router: RouteSearch, workers: Sequence[Group], batch: int
) -> tuple[StepCost, ...] | None:
    """Return the cost of an inner step for each worker; a site uses its fastest exact route."""
    inner = []
    for worker in workers:
        members = tuple(sorted(worker))
        if len(members) == 1:
            price: StepCost | None = cost_alone(problem, members[0], batch)
        else:
            ways = (way for way in router.ways(members) if way != "sites")
            routes = (router.route(members, way, problem.exact) for way in ways)
            prices = [cost_step(problem, members, route, problem.exact, batch) for route in routes]
            price = min((cost for cost in prices if cost), key=lambda cost: cost.step_s, default=None)
        if price is None:
            return None
        inner.append(price)
    return tuple(inner)
