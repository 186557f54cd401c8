"""Calibration: factors that explain measured steps, bounded and with memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning import Calibration, ModelSize, Observation, PlanLimits, make_plans, observation, refit
from barnraise.planning.plan.calibration import MAX_FACTOR, MIN_FACTOR, Fitted
from tests.unit.planning.clusters import MODEL, PROFILE, clusters, mesh, models, profiles


def _twice(**changes: float) -> Observation:
    given = {"compute_s": 1.0, "transfer_s": 2.0, "hideable_s": 0.5, "last_share": 0.1, "rest_s": 0.1}
    return Observation(traffic="every_step", **{"measured_s": 3.0, **given, **changes})


@settings(max_examples=30, deadline=None)
@given(clusters(max_machines=3), models, profiles, st.floats(0.3, 15.0), st.sampled_from(["exact", "auto"]))
def test_refitted_calibration_predicts_the_measured_step(cluster, model, profile, factor, sync) -> None:  # type: ignore[no-untyped-def]
    """Measure a plan under another factor, refit, and plan again: the figures agree."""
    options = PlanLimits(sync=sync)
    plan = make_plans(cluster, model, profile, options).chosen
    if plan.traffic is None or not plan.wire.transfer_s or (plan.kind == "local_steps" and plan.sites):
        return
    wire = plan.wire
    share, hidden = wire.last_share, wire.hideable_s * (1 - wire.last_share)
    visible = max(factor * wire.transfer_s * share, factor * wire.transfer_s - hidden)
    busy = max(part.compute_s for part in plan.parts)
    measured = busy + visible + wire.codec_s + plan.phases.overhead_s
    learnt = refit(Calibration(), observation(plan, cluster, measured)).factor(plan.traffic)
    again = max(learnt * wire.transfer_s * share, learnt * wire.transfer_s - hidden)
    assert MIN_FACTOR <= learnt <= MAX_FACTOR
    assert again == pytest.approx(visible, rel=1e-6, abs=0.01 * measured)


def test_first_observation_counts_fully_and_later_ones_partly() -> None:
    fresh = Calibration()
    assert fresh.factor("every_step") == 1.1
    assert fresh.factor("local_steps") == 1.5
    once = refit(fresh, _twice())
    # 3.0 - 1.0 - 0.1 were seen, and 0.45 of the 2.0 can hide.
    assert once.factor("every_step") == pytest.approx((1.9 + 0.45) / 2.0)
    again = refit(once, _twice(measured_s=5.0))
    assert once.factor("every_step") < again.factor("every_step") < (3.9 + 0.45) / 2.0
    for _ in range(40):
        again = refit(again, _twice(measured_s=5.0))
    assert again.factor("every_step") == pytest.approx((3.9 + 0.45) / 2.0, rel=0.01)


def test_unobserved_traffic_uses_the_mean_deviation() -> None:
    learnt = Calibration(fitted=(Fitted(traffic="every_step", factor=2.2, seen=1),))
    assert learnt.factor("local_steps") == pytest.approx(3.0)
    assert learnt.factor("compressed") == pytest.approx(2.2)


def test_factors_are_bounded_and_nonsense_is_ignored() -> None:
    assert refit(Calibration(), _twice(measured_s=1e6)).factor("every_step") == pytest.approx(MAX_FACTOR)
    assert refit(Calibration(), _twice(measured_s=1e-6)).factor("every_step") == pytest.approx(MIN_FACTOR)
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        assert refit(Calibration(), _twice(measured_s=nonsense)) == Calibration()


def test_hidden_communication_does_not_raise_the_factor() -> None:
    hidden = _twice(transfer_s=0.1, hideable_s=5.0, last_share=0.0, measured_s=1.1)
    assert refit(Calibration(), hidden).factor("every_step") == 1.1


def test_measured_computing_is_separated_from_communication() -> None:
    alone = make_plans(mesh([10]), MODEL, PROFILE).chosen
    slower = refit(Calibration(), observation(alone, mesh([10]), 2 * alone.step_s))
    assert slower.compute == pytest.approx(2.0, rel=0.01)
    assert make_plans(mesh([10]), MODEL, PROFILE, calibration=slower).chosen.step_s == pytest.approx(
        2 * alone.step_s, rel=0.01
    )
    cluster = mesh([10, 10], 9400.0)
    pair = make_plans(cluster, ModelSize(parameters=10_000_000), PROFILE).chosen
    both = refit(Calibration(), observation(pair, cluster, pair.step_s + 12.8, 2 * 12.8))
    assert both.compute == pytest.approx(2.0)
    assert both.factor("every_step") == pytest.approx(1.1, rel=0.2)


def test_updated_speeds_are_not_counted_twice() -> None:
    cluster = mesh([10, 10], 9400.0)
    pair = make_plans(cluster, ModelSize(parameters=10_000_000), PROFILE).chosen
    throttled = mesh([5, 5], 9400.0)
    learnt = refit(Calibration(), observation(pair, throttled, pair.step_s + 12.8))
    assert learnt.compute == 1.0
    assert learnt.factor("every_step") == pytest.approx(1.1, rel=0.2)
