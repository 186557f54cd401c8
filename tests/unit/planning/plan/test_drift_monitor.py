"""Drift monitor: noise causes nothing, a lasting change causes one proposal, and plans do not flap."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning import (
    Calibration,
    DriftMonitor,
    ModelSize,
    Replan,
    StepTimes,
    adopt_plan,
    is_worth_switching,
    make_plans,
    observation,
    observe_step,
    refit,
    start_monitor,
)
from barnraise.planning.plan.drift_monitor import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    MIN_COMMITS,
    MIN_DURATION_S,
    is_same,
)
from tests.unit.planning.clusters import MODEL, PROFILE, mesh


def _run(
    state: DriftMonitor, steps: Iterable[float], now: float = 0.0
) -> tuple[DriftMonitor, list[tuple[float, Replan]]]:
    proposals = []
    for step in steps:
        now += step
        state, proposal, reason = observe_step(state, step, now)
        assert reason
        if proposal is not None:
            proposals.append((now, proposal))
    return state, proposals


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.85, 1.15), min_size=1, max_size=100), st.floats(0.01, 100.0))
def test_noise_causes_no_proposal(noise: list[float], expected: float) -> None:
    _, proposals = _run(DriftMonitor(expected_s=expected), (expected * each for each in noise * 10))
    assert proposals == []


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.2, 60.0), st.sampled_from([2.0, 0.5, 5.0]))
def test_lasting_change_causes_one_proposal(seed: int, expected: float, factor: float) -> None:
    chance = random.Random(seed)
    before = [expected * chance.uniform(0.95, 1.05) for _ in range(50)]
    after = [factor * expected * chance.uniform(0.95, 1.05) for _ in range(800)]
    state, proposals = _run(DriftMonitor(expected_s=expected), before + after)
    assert len(proposals) == state.proposals == 1
    at, proposal = proposals[0]
    assert proposal.measured_s == pytest.approx(factor * expected, rel=0.05)
    assert proposal.commits >= MIN_COMMITS
    assert at >= sum(before) + MIN_DURATION_S
    slack = 2 * factor * expected * 1.05
    assert at <= sum(before) + max(MIN_DURATION_S, MIN_COMMITS * factor * expected * 1.05) + slack


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400), st.floats(0.2, 10.0))
def test_alternating_speeds_do_not_cause_flapping(length: int, expected: float) -> None:
    steps = ([expected] * length + [2 * expected] * length) * (1200 // length)
    _, proposals = _run(DriftMonitor(expected_s=expected), steps)
    # Each rest is twice as long as the one before, up to the longest.
    max_proposals = 2 + math.log2(1 + sum(steps) / FIRST_PAUSE_S) + sum(steps) / MAX_PAUSE_S
    assert len(proposals) <= max_proposals
    for (first, _), (second, _) in pairwise(proposals):
        assert second - first >= FIRST_PAUSE_S
    if length < MIN_COMMITS:
        assert proposals == []


def test_expected_step_resets_the_count() -> None:
    steps = ([3.0] * 9 + [1.0]) * 50
    _, proposals = _run(DriftMonitor(expected_s=1.0), [*steps, *([3.0, 0.5] * 100)])
    assert proposals == []
    state, _, reason = observe_step(DriftMonitor(expected_s=1.0), float("nan"), 5.0)
    assert (state, reason) == (DriftMonitor(expected_s=1.0), "the measured time is not a valid step time")


def test_reasons_name_the_measured_steps() -> None:
    state = DriftMonitor(expected_s=4.0)
    reasons = []
    for number in range(11):
        state, _, reason = observe_step(state, 8.0, 8.0 * (number + 1))
        reasons.append(reason)
    assert reasons[3] == "4 steps in 24 s took longer; too few to make a new plan"
    assert reasons[9] == "10 steps in 72 s took longer than the predicted 4 s: 8 s on average"
    assert reasons[10] == "as expected (1.00 of the prediction)"
    assert msgspec.json.decode(msgspec.json.encode(state), type=DriftMonitor) == state


def test_plan_is_changed_if_another_is_a_tenth_better() -> None:
    """With a tenth of the measured bandwidth one machine alone is better."""
    cluster, profile = mesh([20, 20], 940.0), StepTimes(batch=256, unit=8)
    current = make_plans(cluster, MODEL, profile).chosen
    assert current.kind == "every_step"
    learnt = refit(Calibration(), observation(current, cluster, 5 * current.step_s))
    new = make_plans(cluster, MODEL, profile, calibration=learnt).chosen
    is_better, reason = is_worth_switching(current, new, 5 * current.step_s)
    assert is_better
    assert new.kind == "alone"
    assert learnt.factor("every_step") > 5
    assert "m00 alone is predicted to be" in reason
    state = adopt_plan(start_monitor(current), new)
    assert state.expected_s == new.step_s


def test_plan_is_kept_if_it_is_nearly_the_best() -> None:
    cluster, model = mesh([20, 20], 940.0), ModelSize(parameters=10_000_000)
    current = make_plans(cluster, model, PROFILE).chosen
    assert is_worth_switching(current, current, 1.3 * current.step_s)[0] is False
    assert "is still the best plan" in is_worth_switching(current, current, 1.3 * current.step_s)[1]
    # One that promises less than a tenth is not taken.
    alone = make_plans(cluster, model, PROFILE).best_alone
    is_better, reason = is_worth_switching(current, alone, alone.step_s * 1.05)
    assert not is_better
    assert "a change is worth it only from 1.10 on" in reason


def test_plans_that_differ_only_in_shares_are_the_same() -> None:
    equal_speeds = make_plans(mesh([20, 20]), ModelSize(parameters=10_000_000), PROFILE).chosen
    unequal_speeds = make_plans(mesh([20, 10]), ModelSize(parameters=10_000_000), PROFILE).chosen
    assert equal_speeds.parts != unequal_speeds.parts
    assert is_same(equal_speeds, unequal_speeds)
    assert not is_same(equal_speeds, make_plans(mesh([20, 20]), MODEL, StepTimes(batch=8)).chosen)
