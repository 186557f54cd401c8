"""From machines, links, model and wishes to a ranked list of plans. Pure; the same input, the same answer.

Every plan that is worth it is priced; the best of each family is written out. Exact plans are chosen from
unless the user has allowed more, and a machine alone is always among them: no group is ever chosen that is
predicted to be slower than the best machine by itself.
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

# Where predictions are equal to the last bit.
_PREFERENCE: tuple[Way, ...] = ("none", "ring", "star", "tree", "sites")


def make_plans(
    cluster: PlanCluster,
    model: ModelSize,
    profile: StepTimes,
    options: PlanLimits | None = None,
    calibration: Calibration | None = None,
) -> PlanRanking:
    """Plans, the best first, and the one to take. RunError if the model fits nowhere."""
    require_members(cluster)
    question = PlanProblem(cluster, model, profile, options or PlanLimits(), calibration or Calibration())
    usable, notes = _usable(question)
    alone = sorted((cost_alone(question, one, profile.batch) for one in usable), key=lambda one: one.step_s)
    if not question.options.is_given:
        groups = worthwhile_groups(question, usable)
    else:
        groups = [usable] if len(usable) > 1 else []
    prices = [*alone, *_prices(question, groups)]
    prices.sort(key=lambda price: _rank(question, price))
    # A given group may have no plan if links are missing. Then an exact one: whatever else comes first in the
    # list, nobody has given his word for it.
    chosen = next((price for price in prices if _is_allowed(question, price)), alone[0])
    shown = _shown(question, prices, chosen, usable)
    plans = {id(price): _written(question, price, alone[0]) for price in shown}
    return PlanRanking(
        plans=tuple(plans.values()),
        chosen=plans[id(chosen)],
        best_alone=plans[id(alone[0])],
        reason=choice_reason(question, plans[id(chosen)], prices, alone[0]),
        sites=tuple(tuple(question.names[one] for one in site) for site in question.sites),
        notes=(*cluster.notes, *notes),
    )


def _usable(question: PlanProblem) -> tuple[Group, list[str]]:
    """Who has the memory for the model, and a note about each who has not. A given group trains already."""
    if question.options.is_given:
        return question.everybody, []
    needed = memory_needed(question, question.exact)
    usable = tuple(one for one in question.everybody if fits(question, (one,), needed))
    small = [question.cluster.members[one] for one in question.everybody if one not in usable]
    if not usable:
        most = max(small, key=lambda member: member.memory_bytes)
        raise RunError(
            f"the model needs {format_size(needed)} on each machine, and {most.name}, which has most, has "
            f"{format_size(most.memory_bytes)}",
            hint="Train a smaller model, or use smaller units: `barnraise.init(unit=...)`.",
        )
    notes = [
        f"{member.name} is left out: it has {format_size(member.memory_bytes)} and the model needs "
        f"{format_size(needed)}."
        for member in small
    ]
    return usable, notes


def _prices(question: PlanProblem, groups: Sequence[Group]) -> Iterator[StepCost]:
    """Exact rings of all groups, and of other families what may be the best.

    The fastest groups come first. Later ones are left out where even without any communication they could
    not be better than what was found; of local steps, better than what can be chosen.
    """
    router, options = RouteSearch(question), question.options
    best: dict[Family, float] = {}
    for group in sorted(groups, key=lambda group: (-question.speed(group), group)):
        work = question.work(group, question.profile.batch)
        fastest = 0.0 if work is None else question.profile.batch / work.longest_s
        exact_ways, encoded_ways = router.ways(group), router.encoded_ways(group)
        for way in dict.fromkeys((*exact_ways, *encoded_ways)) if work is not None else ():
            level = options.levels.across if way == "sites" else options.levels.inside
            if level.period not in (AUTO, 1):
                continue
            for codec in _codecs(question, level.codec):
                if way not in (exact_ways if codec.is_exact else encoded_ways):
                    continue
                limit = fastest / (1 + options.speed_per_loss * codec.step_cost)
                known = best.get(("every_step", way, codec.name, False, True), 0.0)
                hopeless = limit <= known and not (codec.is_exact and way == "ring")
                if hopeless or not _has_room(question, group, codec):
                    continue
                route = router.route(group, way, codec)
                price = cost_step(question, group, route, codec, question.profile.batch)
                if price is not None:
                    yield _noted(question, best, price)
        if options.local_steps:
            rounds = [worth for family, worth in best.items() if family[0] == "local_steps" and family[-1]]
            if question.speed(group) > max(rounds, default=0.0):
                for price in local_sgd_costs(question, router, group):
                    yield _noted(question, best, price)


def _has_room(question: PlanProblem, group: Group, codec: PlanCodec) -> bool:
    is_there = question.options.is_given and codec.is_exact
    return is_there or fits(question, group, memory_needed(question, codec))


def _noted(question: PlanProblem, best: dict[Family, float], price: StepCost) -> StepCost:
    family = _family(price)
    best[family] = max(best.get(family, 0.0), score(price, question.options.speed_per_loss))
    return price


def _family(price: StepCost) -> Family:
    return (price.kind, price.route.way, price.codec.name, price.overlapped, price.is_proposed)


def _codecs(question: PlanProblem, fixed: str) -> tuple[PlanCodec, ...]:
    return tuple(codec for codec in question.codecs if fixed in (AUTO, codec.name))


def _is_allowed(question: PlanProblem, price: StepCost) -> bool:
    options = question.options
    least = question.count if options.is_given else options.least_machines
    if len(price.group) < least:
        return False
    if price.kind == "local_steps" and options.overlaps not in (None, price.overlapped):
        return False
    return price.is_exact or (options.sync == "auto" and price.is_proposed)


def _rank(question: PlanProblem, price: StepCost) -> tuple[float, int, int, Group, int]:
    """The best first; of equals the smaller group and the simpler way."""
    worth = score(price, question.options.speed_per_loss)
    way = _PREFERENCE.index(price.route.way)
    return (-worth, len(price.group), way, price.group, price.period)


def _shown(
    question: PlanProblem, prices: Sequence[StepCost], chosen: StepCost, usable: Group
) -> list[StepCost]:
    """The chosen one, each machine alone, the best of each family, and then the best of the rest."""
    families: dict[tuple[object, ...], StepCost] = {}
    for price in prices:
        families.setdefault(_family(price), price)
        if price.kind == "alone":
            families[price.group] = price
        elif price.group == usable and price.is_exact:
            families.setdefault(("everybody",), price)
    must = {id(price) for price in families.values()} | {id(chosen)}
    room = max(0, question.options.most_plans - len(must))
    for price in prices:
        if room and id(price) not in must and price.is_exact:
            must.add(id(price))
            room -= 1
    return [price for price in prices if id(price) in must]


def _written(question: PlanProblem, price: StepCost, best_alone: StepCost) -> Plan:
    """The plan of a price."""
    names, route = question.names, price.route
    carried = flows_of(question, price)
    link = slowest_link(question, carried)
    sites = sorted(route.sites, key=lambda site: route.order.index(site[0]))
    order = [one for site in sites for one in site] or route.order
    outer = None
    if price.kind == "local_steps":
        outer = outer_rule(price.codec, price.period, is_lora=question.model.is_lora)
    return Plan(
        name=plan_name(question, price),
        kind=price.kind,
        traffic=price.traffic,
        way=route.way,
        codec=price.codec.name,
        is_exact=price.is_exact,
        is_allowed=_is_allowed(question, price),
        order=tuple(names[one] for one in order),
        levels=levels_of(price),
        sites=tuple(PlanSite(members=tuple(names[one] for one in site)) for site in sites),
        parts=parts_of(question, price, carried),
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
            factor=1.0 if price.traffic is None else question.calibration.factor(price.traffic),
            hideable_s=price.hideable_s,
            last_share=price.last_share,
            codec_s=price.codec_s,
        ),
        slowest_link=link,
        quality=price.quality,
        score=score(price, question.options.speed_per_loss),
        reason=plan_reason(question, price, best_alone, link),
        period=price.period,
        is_overlapped=price.overlapped,
        outer=outer,
    )
