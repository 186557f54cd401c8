"""Planner: from machines, links, model and limits to a ranked list of plans. Pure and deterministic.

Every plan that may be useful gets a cost, and the best of each family is returned. Only exact plans are
chosen unless the user allows others. One machine alone is always among them. So a group that is predicted to
be slower than the best single machine is never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from barnraise.core.errors import RunError
from barnraise.core.units import format_size
from barnraise.planning.cost.local_sgd_cost import local_sgd_costs
from barnraise.planning.cost.quality_model import outer_rule
from barnraise.planning.cost.route_search import RouteSearch
from barnraise.planning.cost.step_cost import (
    Kind,
    StepCost,
    cost_alone,
    cost_step,
    fits,
    memory_needed,
    score,
)
from barnraise.planning.cost.traffic_model import Way
from barnraise.planning.inputs.cluster import PlanCluster, require_members
from barnraise.planning.inputs.codecs import PlanCodec
from barnraise.planning.inputs.inputs import ModelSize, PlanLimits, StepTimes
from barnraise.planning.inputs.levels import AUTO
from barnraise.planning.inputs.problem import Group, PlanProblem
from barnraise.planning.plan.calibration import Calibration
from barnraise.planning.plan.groups import worthwhile_groups
from barnraise.planning.plan.plan_details import flows_of, levels_of, parts_of, slowest_link
from barnraise.planning.plan.plans import Plan, PlanRanking, PlanSite, StepPhases, WireTraffic
from barnraise.planning.plan.reasons import choice_reason, plan_name, plan_reason

Family = tuple[Kind, Way, str, bool, bool]

# The order of preference between equal predictions.
_PREFERENCE: tuple[Way, ...] = ("none", "ring", "star", "tree", "sites")


def make_plans(
    cluster: PlanCluster,
    model: ModelSize,
    profile: StepTimes,
    options: PlanLimits | None = None,
    calibration: Calibration | None = None,
) -> PlanRanking:
    """Return the plans, the best first, and the chosen one; raise RunError if the model fits nowhere."""
    require_members(cluster)
    problem = PlanProblem(cluster, model, profile, options or PlanLimits(), calibration or Calibration())
    usable, notes = _usable(problem)
    alone = sorted(
        (cost_alone(problem, member, profile.batch) for member in usable), key=lambda price: price.step_s
    )
    if not problem.options.is_given:
        groups = worthwhile_groups(problem, usable)
    else:
        groups = [usable] if len(usable) > 1 else []
    prices = [*alone, *_prices(problem, groups)]
    prices.sort(key=lambda price: _rank(problem, price))
    # A given group may have no plan if links are missing. Then the best machine alone is chosen, because
    # nothing else is allowed.
    chosen = next((price for price in prices if _is_allowed(problem, price)), alone[0])
    shown = _select_shown(problem, prices, chosen, usable)
    plans = {id(price): _to_plan(problem, price, alone[0]) for price in shown}
    return PlanRanking(
        plans=tuple(plans.values()),
        chosen=plans[id(chosen)],
        best_alone=plans[id(alone[0])],
        reason=choice_reason(problem, plans[id(chosen)], prices, alone[0]),
        sites=tuple(tuple(problem.names[member] for member in site) for site in problem.sites),
        notes=(*cluster.notes, *notes),
    )


def _usable(problem: PlanProblem) -> tuple[Group, list[str]]:
    """Return the machines with enough memory, and a note about each of the others.

    A given group trains already, so it is not checked.
    """
    if problem.options.is_given:
        return problem.all_members, []
    needed = memory_needed(problem, problem.exact)
    usable = tuple(member for member in problem.all_members if fits(problem, (member,), needed))
    small = [problem.cluster.members[member] for member in problem.all_members if member not in usable]
    if not usable:
        largest = max(small, key=lambda member: member.memory_bytes)
        raise RunError(
            f"the model needs {format_size(needed)} on each machine, and {largest.name}, the largest, has "
            f"{format_size(largest.memory_bytes)}",
            hint="Train a smaller model, or use smaller micro-batches: `barnraise.init(unit=...)`.",
        )
    notes = [
        f"{member.name} is left out: it has {format_size(member.memory_bytes)} and the model needs "
        f"{format_size(needed)}."
        for member in small
    ]
    return usable, notes


def _prices(problem: PlanProblem, groups: Sequence[Group]) -> Iterator[StepCost]:
    """Yield the costs of exact rings of all groups, and of other families where they may be the best.

    The fastest groups come first. A later group is skipped if it could not be better even without
    communication.
    """
    router, options = RouteSearch(problem), problem.options
    best: dict[Family, float] = {}
    for group in sorted(groups, key=lambda group: (-problem.speed(group), group)):
        work = problem.work(group, problem.profile.batch)
        fastest = 0.0 if work is None else problem.profile.batch / work.longest_s
        exact_ways, encoded_ways = router.ways(group), router.encoded_ways(group)
        for way in dict.fromkeys((*exact_ways, *encoded_ways)) if work is not None else ():
            level = options.levels.across if way == "sites" else options.levels.inside
            if level.period not in (AUTO, 1):
                continue
            for codec in _codecs(problem, level.codec):
                if way not in (exact_ways if codec.is_exact else encoded_ways):
                    continue
                limit = fastest / (1 + options.speed_per_loss * codec.step_cost)
                known = best.get(("every_step", way, codec.name, False, True), 0.0)
                is_dominated = limit <= known and not (codec.is_exact and way == "ring")
                if is_dominated or not _has_memory(problem, group, codec):
                    continue
                route = router.route(group, way, codec)
                price = cost_step(problem, group, route, codec, problem.profile.batch)
                if price is not None:
                    yield _record_best(problem, best, price)
        if options.local_steps:
            rounds = [worth for family, worth in best.items() if family[0] == "local_steps" and family[-1]]
            if problem.speed(group) > max(rounds, default=0.0):
                for price in local_sgd_costs(problem, router, group):
                    yield _record_best(problem, best, price)


def _has_memory(problem: PlanProblem, group: Group, codec: PlanCodec) -> bool:
    is_training = problem.options.is_given and codec.is_exact
    return is_training or fits(problem, group, memory_needed(problem, codec))


def _record_best(problem: PlanProblem, best: dict[Family, float], price: StepCost) -> StepCost:
    family = _family(price)
    best[family] = max(best.get(family, 0.0), score(price, problem.options.speed_per_loss))
    return price


def _family(price: StepCost) -> Family:
    return (price.kind, price.route.way, price.codec.name, price.overlapped, price.is_proposed)


def _codecs(problem: PlanProblem, fixed: str) -> tuple[PlanCodec, ...]:
    return tuple(codec for codec in problem.codecs if fixed in (AUTO, codec.name))


def _is_allowed(problem: PlanProblem, price: StepCost) -> bool:
    """Return True if the limits allow this plan to be chosen."""
    options = problem.options
    min_machines = problem.count if options.is_given else options.least_machines
    if len(price.group) < min_machines:
        return False
    if price.kind == "local_steps" and options.overlaps not in (None, price.overlapped):
        return False
    return price.is_exact or (options.sync == "auto" and price.is_proposed)


def _rank(problem: PlanProblem, price: StepCost) -> tuple[float, int, int, Group, int]:
    """Return the sort key: the best score first, then the smaller group and the simpler route."""
    worth = score(price, problem.options.speed_per_loss)
    way = _PREFERENCE.index(price.route.way)
    return (-worth, len(price.group), way, price.group, price.period)


def _select_shown(
    problem: PlanProblem, prices: Sequence[StepCost], chosen: StepCost, usable: Group
) -> list[StepCost]:
    """Return the chosen plan, each machine alone, the best of each family, and then the best of the rest."""
    families: dict[tuple[object, ...], StepCost] = {}
    for price in prices:
        families.setdefault(_family(price), price)
        if price.kind == "alone":
            families[price.group] = price
        elif price.group == usable and price.is_exact:
            families.setdefault(("everybody",), price)
    selected = {id(price) for price in families.values()} | {id(chosen)}
    free = max(0, problem.options.most_plans - len(selected))
    for price in prices:
        if free and id(price) not in selected and price.is_exact:
            selected.add(id(price))
            free -= 1
    return [price for price in prices if id(price) in selected]


def _to_plan(problem: PlanProblem, price: StepCost, best_alone: StepCost) -> Plan:
    """Return the plan with all details of its cost."""
    names, route = problem.names, price.route
    carried = flows_of(problem, price)
    link = slowest_link(problem, carried)
    sites = sorted(route.sites, key=lambda site: route.order.index(site[0]))
    order = [member for site in sites for member in site] or route.order
    outer = None
    if price.kind == "local_steps":
        outer = outer_rule(price.codec, price.period, is_lora=problem.model.is_lora)
    return Plan(
        name=plan_name(problem, price),
        kind=price.kind,
        traffic=price.traffic,
        way=route.way,
        codec=price.codec.name,
        is_exact=price.is_exact,
        is_allowed=_is_allowed(problem, price),
        order=tuple(names[member] for member in order),
        levels=levels_of(price),
        sites=tuple(PlanSite(members=tuple(names[member] for member in site)) for site in sites),
        parts=parts_of(problem, price, carried),
        step_s=price.step_s,
        samples_per_s=price.samples_per_s,
        speedup=price.samples_per_s / best_alone.samples_per_s,
        utilisation=price.compute_s / price.step_s,
        phases=StepPhases(
            compute_s=price.compute_s,
            communication_s=price.communication_s,
            waiting_s=price.waiting_s,
            overhead_s=price.overhead_s,
        ),
        wire=WireTraffic(
            transfer_s=price.transfer_s,
            factor=1.0 if price.traffic is None else problem.calibration.factor(price.traffic),
            hideable_s=price.hideable_s,
            last_share=price.last_share,
            codec_s=price.codec_s,
        ),
        slowest_link=link,
        quality=price.quality,
        score=score(price, problem.options.speed_per_loss),
        reason=plan_reason(problem, price, best_alone, link),
        period=price.period,
        is_overlapped=price.overlapped,
        outer=outer,
    )
