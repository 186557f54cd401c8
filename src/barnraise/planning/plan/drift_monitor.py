"""Whether reality still agrees with a plan, and whether another one is worth the change. Pure.

Steps that are off by more than a fifth, all in one direction, for a while, are a reason to plan again at the
next commit. A change must promise a tenth, and after each proposal there is a time of rest, twice as long
as the last one: machines whose speed comes and goes do not make plans come and go.
"""

from __future__ import annotations

import math

import msgspec

from barnraise.core.units import format_duration
from barnraise.planning.plan.plans import Plan

OFF = 0.20
LEAST_COMMITS = 10
LEAST_S = 30.0
FIRST_REST_S = 300.0
LONGEST_REST_S = 6 * 3600.0
WORTH = 1.10


class DriftMonitor(msgspec.Struct, frozen=True, kw_only=True):
    """What steps are compared with, and those that have been off one after the other."""

    expected_s: float
    slower: bool = False
    count: int = 0
    total_s: float = 0.0
    since: float = 0.0
    rests_until: float | None = None
    rest_s: float = FIRST_REST_S
    proposals: int = 0


class Replan(msgspec.Struct, frozen=True, kw_only=True):
    """A proposal to plan again at a commit: what was expected, and the mean of what was measured."""

    expected_s: float
    measured_s: float
    commits: int


def start_monitor(plan: Plan) -> DriftMonitor:
    return DriftMonitor(expected_s=plan.step_s)


def observe_step(
    state: DriftMonitor, measured_step_s: float, now: float
) -> tuple[DriftMonitor, Replan | None, str]:
    """One more commit. After a proposal, what was measured is what later steps are compared with."""
    if not (math.isfinite(measured_step_s) and measured_step_s > 0):
        return state, None, "this is not a time of a step"
    ratio = measured_step_s / state.expected_s
    if abs(ratio - 1) <= OFF:
        return _calm(state), None, f"as expected ({ratio:.2f} of the prediction)"
    slower = ratio > 1
    if not state.count or slower != state.slower:
        state = msgspec.structs.replace(_calm(state), slower=slower, since=now)
    state = msgspec.structs.replace(state, count=state.count + 1, total_s=state.total_s + measured_step_s)
    lasted = now - state.since
    seen = f"{state.count} steps in {format_duration(lasted)} took {'longer' if slower else 'less time'}"
    if state.count < LEAST_COMMITS or lasted < LEAST_S:
        return state, None, f"{seen}; too few to plan again"
    if state.rests_until is not None and now < state.rests_until:
        rest = format_duration(state.rests_until - now)
        return state, None, f"{seen}; the last change is recent, so nothing is done for {rest}"
    mean = state.total_s / state.count
    proposal = Replan(expected_s=state.expected_s, measured_s=mean, commits=state.count)
    rested = msgspec.structs.replace(
        _calm(state),
        expected_s=mean,
        rests_until=now + state.rest_s,
        rest_s=min(LONGEST_REST_S, 2 * state.rest_s),
        proposals=state.proposals + 1,
    )
    was = format_duration(proposal.expected_s)
    return rested, proposal, f"{seen} than the {was} that were predicted: {format_duration(mean)} on average"


def adopt_plan(state: DriftMonitor, plan: Plan) -> DriftMonitor:
    """Another plan was taken: its prediction is what counts now. The rest goes on."""
    return msgspec.structs.replace(_calm(state), expected_s=plan.step_s)


def is_worth_switching(current: Plan, found: Plan, measured_step_s: float) -> tuple[bool, str]:
    """Whether to change from a plan whose steps take so long to another one, and why."""
    gain = found.score / (current.score * current.step_s / measured_step_s)
    step = format_duration(measured_step_s)
    if is_same(current, found):
        return False, f"{current.name} takes {step} a step, and is still the best plan."
    faster = f"{found.name} is predicted to be {gain:.2f} times as fast"
    if gain < WORTH:
        why = f"{current.name} takes {step} a step. {faster}: below {WORTH:.2f} a change is not worth it."
        return False, why
    was = format_duration(current.step_s)
    return True, f"{current.name} takes {step} a step instead of {was}. {faster}. {found.reason}"


def is_same(one: Plan, other: Plan) -> bool:
    """Whether changing from one plan to the other would change nothing but shares."""
    return (
        one.order == other.order
        and one.sites == other.sites
        and one.levels == other.levels
        and one.is_overlapped == other.is_overlapped
    )


def _calm(state: DriftMonitor) -> DriftMonitor:
    return msgspec.structs.replace(state, count=0, total_s=0.0, since=0.0)
