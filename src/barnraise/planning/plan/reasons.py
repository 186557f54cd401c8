"""Why a plan is as fast as it is, and why one is chosen: sentences with the figures that decided. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.core.units import counted, format_duration, format_rate, format_size
from barnraise.planning.cost.step_cost import StepCost, fits, memory_needed, score
from barnraise.planning.inputs.problem import PlanProblem
from barnraise.planning.plan.calibration import Calibration
from barnraise.planning.plan.plan_details import flows_of, slowest_link
from barnraise.planning.plan.plans import Plan, SlowestLink, listed


def plan_name(question: PlanProblem, price: StepCost) -> str:
    names = _members(question, price)
    if price.kind == "alone":
        return f"{names} alone"
    way = {"ring": "a ring", "tree": "a tree", "star": "a star", "sites": "sites"}[price.route.way]
    if price.kind == "every_step":
        return f"{names}: every step, {way}, {price.codec.name}"
    how = "overlapped" if price.overlapped else "blocking"
    return f"{names}: rounds of {price.period} local steps, {way}, {price.codec.name}, {how}"


def plan_reason(
    question: PlanProblem, price: StepCost, best_alone: StepCost, link: SlowestLink | None
) -> str:
    """The prediction in words."""
    seconds = f"{format_duration(price.step_s)} for a batch"
    if price.kind == "alone":
        member = question.cluster.members[price.group[0]]
        return f"{seconds}: {member.samples_per_s:.3g} samples/s ({member.source})."
    ratio = price.samples_per_s / best_alone.samples_per_s
    text = (
        f"{seconds}, {ratio:.2f} times the speed of {_members(question, best_alone)} alone: {_phases(price)}."
    )
    if link is not None:
        text += (
            f" The slowest path, from {link.source} to {link.target} at {format_rate(link.mbps * 1e6)}, "
            f"carries {format_size(link.bytes_per_step)} a step."
        )
    if price.kind == "local_steps":
        steps = (
            f"{min(price.counts)} to {max(price.counts)}" if len(set(price.counts)) > 1 else price.counts[0]
        )
        text += f" In a round each of {counted(len(price.counts), 'worker')} takes {steps} steps"
        text += "." if price.is_fixed or price.remark else f"; {_why_no_shorter(question)}"
    if price.quality.cost:
        text += f" Expected to cost {price.quality.cost:.1%} of the loss ({price.quality.source})."
    return f"{text} {price.remark}".rstrip()


def _why_no_shorter(question: PlanProblem) -> str:
    return (
        f"shorter rounds would leave less than {question.options.utilisation:.0%} of the time for computing."
    )


def choice_reason(
    question: PlanProblem, chosen: Plan, prices: Sequence[StepCost], best_alone: StepCost
) -> str:
    """Why this plan and no other; of a machine alone, what would change that."""
    auto = _with_auto(question, chosen, prices)
    if chosen.kind != "alone":
        return f"{chosen.name}. {chosen.reason}{_without(question, chosen)}{auto}"
    alone = _members(question, best_alone)
    text = f"{alone} alone is fastest: {format_duration(best_alone.step_s)} for a batch."
    groups = [price for price in prices if price.kind == "every_step" and price.is_exact]
    if not groups:
        return f"{text} There is no other machine that it could share steps with.{auto}"
    rival = groups[0]
    text += f" The best group, {_members(question, rival)}, would need {format_duration(rival.step_s)}"
    return f"{text}: {_phases(rival)}.{_what_would_change_it(question, groups, best_alone)}{auto}"


def _without(question: PlanProblem, chosen: Plan) -> str:
    """Why others are not used. Of those whose memory is too small there is a note."""
    used = {part.name for part in chosen.parts}
    needed = memory_needed(question, question.exact)
    fitting = [one for one in question.everybody if fits(question, (one,), needed)]
    idle = [question.names[one] for one in fitting if question.names[one] not in used]
    units = -(-question.profile.batch // question.profile.unit_size)
    if not idle:
        return ""
    if units < len(fitting):
        return f" A batch has {units} units, too few for {listed(idle)} to get one."
    return f" With {listed(idle)} it would not be faster."


def _members(question: PlanProblem, price: StepCost) -> str:
    return listed([question.names[one] for one in price.group])


def _phases(price: StepCost) -> str:
    return (
        f"computing {format_duration(price.compute_s)}, communication that is not hidden "
        f"{format_duration(price.communication_s)}, waiting {format_duration(price.waiting_s)}"
    )


def _what_would_change_it(question: PlanProblem, groups: Sequence[StepCost], best_alone: StepCost) -> str:
    """How much faster the links of some group would have to be for it to overtake the machine alone."""
    found = [
        (times, place)
        for place, price in enumerate(groups)
        if (times := links_needed(price, best_alone.step_s, question.calibration)) is not None
    ]
    if not found:
        return " No network would change that: the others take too long for even one unit."
    times, place = min(found)
    price = groups[place]
    link = slowest_link(question, flows_of(question, price))
    rate = (
        ""
        if link is None
        else f" ({format_rate(link.mbps * times * 1e6)} from {link.source} to {link.target})"
    )
    faster = f"{times:.0f}" if times >= 10 else f"{times:.1f}"
    return f" {_members(question, price)} would be as fast if links were {faster} times as fast{rate}."


def links_needed(price: StepCost, step_s: float, calibration: Calibration) -> float | None:
    """How many times as fast links make this plan's step last ``step_s``; None if none do."""
    room = step_s - (price.step_s - price.communication_s) - price.codec_s
    bearable = room + price.hideable_s * (1 - price.last_share)
    if price.last_share > 0:
        bearable = min(bearable, room / price.last_share)
    if room <= 0 or bearable <= 0 or price.traffic is None:
        return None
    return calibration.factor(price.traffic) * price.transfer_s / bearable


def _with_auto(question: PlanProblem, chosen: Plan, prices: Sequence[StepCost]) -> str:
    """What is not done unless the user allows it."""
    if question.options.sync == "auto":
        return ""
    lossy = next((price for price in prices if not price.is_exact and price.is_proposed), None)
    if lossy is None or score(lossy, question.options.speed_per_loss) <= chosen.score:
        return ""
    form = lossy.codec.name
    if lossy.kind == "local_steps":
        form = f"rounds of {lossy.period} local steps with {form}"
    times = lossy.samples_per_s / chosen.samples_per_s
    return (
        f" With sync 'auto', {form} would be {times:.2f} times as fast, at an expected cost of "
        f"{lossy.quality.cost:.1%} of the loss."
    )
