"""Reasons of plans: sentences with the figures that decided. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.core.units import counted, format_duration, format_rate, format_size
from barnraise.planning.cost.step_cost import StepCost, fits, memory_needed, score
from barnraise.planning.inputs.problem import PlanProblem
from barnraise.planning.plan.calibration import Calibration
from barnraise.planning.plan.plan_details import flows_of, slowest_link
from barnraise.planning.plan.plans import Plan, SlowestLink, listed

_MUCH = 2.0  # factor of a calibration that is told


def plan_name(problem: PlanProblem, price: StepCost) -> str:
    names = _members(problem, price)
    if price.kind == "alone":
        return f"{names} alone"
    way = {"ring": "a ring", "tree": "a tree", "star": "a star", "sites": "sites"}[price.route.way]
    if price.kind == "every_step":
        return f"{names}: every step, {way}, {price.codec.name}"
    how = "overlapped" if price.overlapped else "blocking"
    return f"{names}: rounds of {price.period} local steps, {way}, {price.codec.name}, {how}"


def plan_reason(problem: PlanProblem, price: StepCost, best_alone: StepCost, link: SlowestLink | None) -> str:
    """Return a sentence with the prediction of a plan."""
    seconds = f"{format_duration(price.step_s)} for a batch"
    if price.kind == "alone":
        member = problem.cluster.members[price.group[0]]
        return f"{seconds}: {member.samples_per_s:.3g} samples/s ({member.source})."
    ratio = price.samples_per_s / best_alone.samples_per_s
    alone = f"{_members(problem, best_alone)} alone, which would need {format_duration(best_alone.step_s)}"
    text = f"{seconds}, {ratio:.2f} times the speed of {alone}: {_phases(price)}."
    if link is not None:
        text += (
            f" The slowest path, from {link.source} to {link.target} at {format_rate(link.mbps * 1e6)}, "
            f"carries {format_size(link.bytes_per_step)} a step."
        )
        text += _calibrated(problem, price)
    if price.kind == "local_steps":
        steps = (
            f"{min(price.counts)} to {max(price.counts)}" if len(set(price.counts)) > 1 else price.counts[0]
        )
        text += f" In a round each of {counted(len(price.counts), 'worker')} takes {steps} steps"
        text += "." if price.is_fixed or price.remark else f"; {_reason_against_shorter(problem)}"
    if price.quality.cost:
        text += f" Expected to cost {price.quality.cost:.1%} of the loss ({price.quality.source})."
    return f"{text} {price.remark}".rstrip()


def _reason_against_shorter(problem: PlanProblem) -> str:
    return (
        f"shorter rounds would leave less than {problem.options.utilisation:.0%} of the time for computing."
    )


def choice_reason(
    problem: PlanProblem, chosen: Plan, prices: Sequence[StepCost], best_alone: StepCost
) -> str:
    """Return why this plan was chosen; for a machine alone, also what would change that."""
    auto = _with_auto(problem, chosen, prices)
    if chosen.kind != "alone":
        return f"{chosen.name}. {chosen.reason}{_idle_machines(problem, chosen)}{auto}"
    alone = _members(problem, best_alone)
    text = f"{alone} alone is fastest: {format_duration(best_alone.step_s)} for a batch."
    groups = [price for price in prices if price.kind == "every_step" and price.is_exact]
    if not groups:
        return f"{text} No other machine can share its steps.{auto}"
    rival = groups[0]
    text += f" The best group, {_members(problem, rival)}, would need {format_duration(rival.step_s)}"
    return f"{text}: {_phases(rival)}.{_links_that_would_help(problem, groups, best_alone)}{auto}"


def _idle_machines(problem: PlanProblem, chosen: Plan) -> str:
    """Return why other machines are not used; a note names those with too little memory."""
    used = {part.name for part in chosen.parts}
    needed = memory_needed(problem, problem.exact)
    fitting = [member for member in problem.all_members if fits(problem, (member,), needed)]
    idle = [problem.names[member] for member in fitting if problem.names[member] not in used]
    units = -(-problem.profile.batch // problem.profile.unit_size)
    if not idle:
        return ""
    if units < len(fitting):
        return f" A batch has {units} micro-batches, too few to give one to {listed(idle)}."
    return f" Adding {listed(idle)} would not make it faster."


def _members(problem: PlanProblem, price: StepCost) -> str:
    return listed([problem.names[member] for member in price.group])


def _phases(price: StepCost) -> str:
    return (
        f"computing {format_duration(price.compute_s)}, communication that is not hidden "
        f"{format_duration(price.communication_s)}, waiting for the slowest machine "
        f"{format_duration(price.waiting_s)}, other {format_duration(price.overhead_s)}"
    )


def _calibrated(problem: PlanProblem, price: StepCost) -> str:
    """Return how the measured steps changed the predicted time of communication, if much."""
    factor = problem.calibration.factor(price.traffic) if price.traffic is not None else 1.0
    if 1 / _MUCH < factor < _MUCH:
        return ""
    return (
        f" By the speed and the round trips of the links, all transfers would need "
        f"{format_duration(price.transfer_s)}; measured steps needed {factor:.2g} times that."
    )


def _links_that_would_help(problem: PlanProblem, groups: Sequence[StepCost], best_alone: StepCost) -> str:
    """Return how much faster the links of a group must be to beat the machine alone."""
    factors = [
        (times, index)
        for index, price in enumerate(groups)
        if (times := links_needed(price, best_alone.step_s, problem.calibration)) is not None
    ]
    if not factors:
        return " A faster network would not change that: the others are too slow for even one micro-batch."
    times, index = min(factors)
    price = groups[index]
    link = slowest_link(problem, flows_of(problem, price))
    rate = (
        ""
        if link is None
        else f" ({format_rate(link.mbps * times * 1e6)} from {link.source} to {link.target})"
    )
    faster = f"{times:.0f}" if times >= 10 else f"{times:.1f}"
    return f" {_members(problem, price)} would be as fast if links were {faster} times as fast{rate}."


def links_needed(price: StepCost, step_s: float, calibration: Calibration) -> float | None:
    """Return the factor by which links must be faster for a step of ``step_s``; None if impossible."""
    budget_s = step_s - (price.step_s - price.communication_s) - price.codec_s
    allowed_s = budget_s + price.hideable_s * (1 - price.last_share)
    if price.last_share > 0:
        allowed_s = min(allowed_s, budget_s / price.last_share)
    if budget_s <= 0 or allowed_s <= 0 or price.traffic is None:
        return None
    return calibration.factor(price.traffic) * price.transfer_s / allowed_s


def _with_auto(problem: PlanProblem, chosen: Plan, prices: Sequence[StepCost]) -> str:
    """Return what sync 'auto' would gain, if the user has not allowed it."""
    if problem.options.sync == "auto":
        return ""
    lossy = next((price for price in prices if not price.is_exact and price.is_proposed), None)
    if lossy is None or score(lossy, problem.options.speed_per_loss) <= chosen.score:
        return ""
    form = lossy.codec.name
    if lossy.kind == "local_steps":
        form = f"rounds of {lossy.period} local steps with {form}"
    times = lossy.samples_per_s / chosen.samples_per_s
    return (
        f" An option that changes the result: with --sync auto, {form} would be {times:.2f} times as fast, "
        f"and the loss is expected to end {lossy.quality.cost:.1%} higher."
    )
