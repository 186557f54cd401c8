"""Plans of local steps: in which form a round's changes travel, and what that costs. Pure.

A worker is one machine, or the machines of one site, which share every step. In a session it is one machine,
also where the changes are summed through sites.
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
    """A group, the way of its rounds, an inner step of each worker, and how long rounds keep them busy.

    ``raw``: the bytes of a machine's own change inside of sites; 0 if the machines of one share every step.
    """

    group: Group
    way: Way
    inner: tuple[StepCost, ...]
    busy: Times
    inner_batch: int
    fixed: int | None
    raw: float


def local_sgd_costs(question: PlanProblem, router: RouteSearch, group: Group) -> list[StepCost]:
    """Every step of the ladder, overlapped and not; those that the rules do not take say why."""
    found: list[StepCost] = []
    levels = question.options.levels
    for way in _ways(question, router, group):
        level = levels.across if way == "sites" else levels.inside
        if level.period == 1 or level.codec == question.exact.name:
            continue
        is_flat = question.options.is_flat
        sites = () if is_flat else router.route(group, way, question.exact).sites
        crews = sites or tuple((one,) for one in group)
        batch = max(1, round(question.profile.batch / len(crews)))
        inner = _inner_steps(question, router, crews, batch)
        if inner is None:
            continue
        codecs = ladder(question.options.codecs)
        if level.codec != AUTO:
            codecs = tuple(codec for codec in question.options.codecs if codec.name == level.codec)
        busy = busy_times([price.step_s for price in inner])
        fixed = None if level.period == "auto" else level.period
        raw = question.model.gradient_bytes if is_flat else 0.0
        case = _Case(group, way, inner, busy, batch, fixed, raw)
        for overlapped in (True, False):
            found += _walk(question, router, case, codecs, overlapped)
    return found


def _ways(question: PlanProblem, router: RouteSearch, group: Group) -> list[Way]:
    """Of ring, star and tree the quickest; sites besides, since its workers are others."""
    ways = router.encoded_ways(group)
    flat = [way for way in ways if way != "sites"]
    payload = question.payload(question.exact)

    def time(way: Way) -> float:
        return round_seconds(router.route(group, way, question.exact), question.wires, payload)

    best = [min(flat, key=time)] if flat else []
    return best + [way for way in ways if way == "sites"]


def _walk(
    question: PlanProblem, router: RouteSearch, case: _Case, codecs: Sequence[PlanCodec], overlapped: bool
) -> list[StepCost]:
    """The ladder: the codec whose rounds are worth most, speed and expected loss together, is taken."""
    found: list[StepCost] = []
    for codec in codecs:
        needed = memory_needed(question, codec, local=True, overlapped=overlapped)
        if not fits(question, case.group, needed):
            continue
        route = router.route(case.group, case.way, codec)
        price = _price(question, case, route, codec, overlapped)
        # What does not keep machines busy in any round is only worth showing if nothing does.
        if price is not None and (not price.remark or codec is codecs[-1]):
            found.append(price)
    limit = period_limit(question.model.parameters)
    taken = max(found, key=lambda price: score(price, question.options.speed_per_loss), default=None)
    judged = []
    for price in found:
        if price is not taken and taken is not None and case.fixed is None:
            why = f"Not proposed: {taken.codec.name} is better, speed and expected loss together."
            price = price._replace(remark=why, is_proposed=False)
        elif case.fixed is None and price.period > limit:
            long = f"Rounds of {price.period} steps are longer than the {limit} that are advisable."
            price = price._replace(remark=price.remark or long)
        judged.append(price)
    return judged


def _price(
    question: PlanProblem, case: _Case, route: Route, codec: PlanCodec, overlapped: bool
) -> StepCost | None:
    transfer = round_seconds(route, question.wires, question.payload(codec), case.raw)
    if transfer == float("inf"):
        return None
    codec_s, overhead = question.codec_s(codec), question.profile.overhead_s
    factor = question.calibration.factor("local_steps")
    steps = [price.step_s for price in case.inner]
    workers = RoundWorkers(steps, factor * transfer, codec_s + overhead, overlapped)
    target = question.options.utilisation
    period = case.fixed or smallest_period(workers, target, case.busy)
    remark = ""
    if period is None:
        period = LONGEST_PERIOD
        needed = max(needed_period(workers, target), period + 1)
        remark = f"For a utilisation of {target:.0%} rounds of {needed} steps or more would be needed."
    found = round_of(workers, period)
    if found is None:
        return None
    batch = case.inner_batch * len(steps)
    compute = batch / question.speed(case.group)
    spare = max(0.0, found.busy_s / period - compute - overhead)
    summed = sum(count * price.communication_s for count, price in zip(found.counts, case.inner, strict=True))
    inside = min(spare, summed / (period * len(steps)))
    return StepCost(
        kind="local_steps",
        group=case.group,
        route=route,
        codec=codec,
        counts=tuple(found.counts),
        compute_s=compute,
        waiting_s=spare - inside,
        communication_s=inside + (found.visible_s + codec_s) / period,
        overhead_s=overhead + overhead / period,
        transfer_s=transfer / period,
        hideable_s=found.busy_s / 2 / period if overlapped else 0.0,
        last_share=0.0,
        codec_s=codec_s / period,
        quality=local_quality(
            question.options.local_curve, codec, period, question.model.parameters, len(steps)
        ),
        batch=batch,
        period=period,
        overlapped=overlapped,
        inner=case.inner,
        remark=remark,
        is_fixed=case.fixed is not None,
    )


def _inner_steps(
    question: PlanProblem, router: RouteSearch, crews: Sequence[Group], batch: int
) -> tuple[StepCost, ...] | None:
    """An inner step of each worker; of several machines, by the quickest exact way that they have."""
    found = []
    for crew in crews:
        members = tuple(sorted(crew))
        if len(members) == 1:
            price: StepCost | None = cost_alone(question, members[0], batch)
        else:
            ways = (way for way in router.ways(members) if way != "sites")
            routes = (router.route(members, way, question.exact) for way in ways)
            prices = [cost_step(question, members, route, question.exact, batch) for route in routes]
            price = min((one for one in prices if one), key=lambda one: one.step_s, default=None)
        if price is None:
            return None
        found.append(price)
    return tuple(found)
