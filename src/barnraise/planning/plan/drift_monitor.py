"""Drift monitor: does a plan still match reality, and is another plan worth the change? Pure.

Steps that are off by more than a fifth, in one direction, for a while, cause a new plan at the next commit.
A change must promise a tenth. After each proposal there is a pause, twice as long as the last one. So
machines with changing speeds do not cause a stream of new plans.
"""

from __future__ import annotations

import math

import msgspec

from barnraise.core.units import format_duration
from barnraise.planning.plan.plans import Plan

TOLERANCE = 0.20
MIN_COMMITS = 10
MIN_DURATION_S = 30.0
FIRST_PAUSE_S = 300.0
MAX_PAUSE_S = 6 * 3600.0
MIN_GAIN = 1.10


class DriftMonitor(msgspec.Struct, frozen=True, kw_only=True):
    """Expected step time, and the recent steps that were off in one direction."""

    expected_s: float
    slower: bool = False
    count: int = 0
    total_s: float = 0.0
    since: float = 0.0
    paused_until: float | None = None
    pause_s: float = FIRST_PAUSE_S
    proposals: int = 0


class Replan(msgspec.Struct, frozen=True, kw_only=True):
    """Proposal to plan again at a commit, with the expected and the mean measured step time."""

    expected_s: float
    measured_s: float
    commits: int


def start_monitor(plan: Plan) -> DriftMonitor:
    """Start to monitor the steps of a plan."""
    return DriftMonitor(expected_s=plan.step_s)


def observe_step(
    state: DriftMonitor, measured_step_s: float, now: float
) -> tuple[DriftMonitor, Replan | None, str]:
    """Add the step time of one commit; return the next state, a proposal if there is one, and a reason.

    After a proposal the measured time is the new expectation.
    """
    if not (math.isfinite(measured_step_s) and measured_step_s > 0):
        return state, None, "the measured time is not a valid step time"
    ratio = measured_step_s / state.expected_s
    if abs(ratio - 1) <= TOLERANCE:
        return _reset_count(state), None, f"as expected ({ratio:.2f} of the prediction)"
    slower = ratio > 1
    if not state.count or slower != state.slower:
        state = msgspec.structs.replace(_reset_count(state), slower=slower, since=now)
    state = msgspec.structs.replace(state, count=state.count + 1, total_s=state.total_s + measured_step_s)
    lasted = now - state.since
    seen = f"{state.count} steps in {format_duration(lasted)} took {'longer' if slower else 'less time'}"
    if state.count < MIN_COMMITS or lasted < MIN_DURATION_S:
        return state, None, f"{seen}; too few to make a new plan"
    if state.paused_until is not None and now < state.paused_until:
        rest = format_duration(state.paused_until - now)
        return state, None, f"{seen}; the last change is recent, so there is no new plan for {rest}"
    mean = state.total_s / state.count
    proposal = Replan(expected_s=state.expected_s, measured_s=mean, commits=state.count)
    paused = msgspec.structs.replace(
        _reset_count(state),
        expected_s=mean,
        paused_until=now + state.pause_s,
        pause_s=min(MAX_PAUSE_S, 2 * state.pause_s),
        proposals=state.proposals + 1,
    )
    was = format_duration(proposal.expected_s)
    return paused, proposal, f"{seen} than the predicted {was}: {format_duration(mean)} on average"


def adopt_plan(state: DriftMonitor, plan: Plan) -> DriftMonitor:
    """Compare later steps with the prediction of another plan; the pause continues."""
    return msgspec.structs.replace(_reset_count(state), expected_s=plan.step_s)


def is_worth_switching(current: Plan, candidate: Plan, measured_step_s: float) -> tuple[bool, str]:
    """Return True if another plan is worth the change, and the reason."""
    gain = candidate.score / (current.score * current.step_s / measured_step_s)
    step = format_duration(measured_step_s)
    if is_same(current, candidate):
        return False, f"{current.name} takes {step} a step, and is still the best plan."
    faster = f"{candidate.name} is predicted to be {gain:.2f} times as fast"
    if gain < MIN_GAIN:
        why = (
            f"{current.name} takes {step} a step. {faster}: a change is worth it only from {MIN_GAIN:.2f} on."
        )
        return False, why
    was = format_duration(current.step_s)
    return True, f"{current.name} takes {step} a step instead of {was}. {faster}. {candidate.reason}"


def is_same(plan: Plan, other: Plan) -> bool:
    """Return True if both plans differ in the split of work at most."""
    return (
        plan.order == other.order
        and plan.sites == other.sites
        and plan.levels == other.levels
        and plan.is_overlapped == other.is_overlapped
    )


def _reset_count(state: DriftMonitor) -> DriftMonitor:
    return msgspec.structs.replace(state, count=0, total_s=0.0, since=0.0)
