"""Rounds of local SGD: the shortest useful period, the codecs, and the expected loss."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning import LOSSY, Calibration, ModelSize, Plan, PlanCodec, PlanLimits, make_plans
from barnraise.planning.cost.link_matrix import LinkMatrix
from barnraise.planning.cost.local_sgd_period import (
    SHORTEST_PERIOD,
    RoundWorkers,
    busy_times,
    is_enough,
    needed_period,
    round_of,
    smallest_period,
)
from barnraise.planning.cost.quality_model import (
    LONGEST_PERIOD,
    LocalCurve,
    local_cost,
    local_quality,
    outer_rule,
    period_limit,
)
from barnraise.planning.cost.traffic_model import Route, ring_hop_s, ring_piece, ring_seconds, seconds
from barnraise.planning.inputs.codecs import ladder, payload
from tests.repository import ROOT
from tests.unit.planning.clusters import PROFILE, mesh

CODECS = {codec.name: codec for codec in LOSSY}


@pytest.mark.parametrize(
    ("parameters", "mbps", "expected"),
    [
        (125e6, 200.0, {"bf16": 45, "int8": 22, "int4": 11, "topk": 1}),
        (1e9, 940.0, {"bf16": 77, "int8": 38, "int4": 19, "topk": 1}),
        (1e9, 200.0, {"bf16": 360, "int8": 180, "int4": 90, "topk": 3}),
        (1e9, 20.0, {"bf16": 3600, "int8": 1800, "int4": 900, "topk": 33}),
        (7e9, 20.0, {"bf16": 25200, "int8": 12600, "int4": 6300, "topk": 229}),
    ],
)
def test_needed_period_agrees_with_published_figures(
    parameters: float, mbps: float, expected: dict[str, int]
) -> None:
    """Four machines, steps of a second, with overlap. Sparse changes: only the upload to a hub."""
    wires = LinkMatrix(mesh([1] * 4, mbps, latency_s=0.0))
    factor = Calibration().factor("local_steps")
    for name, period in expected.items():
        size = payload(CODECS[name], int(parameters))
        if name == "topk":
            transfer = size.size / wires.rate[0][1]
        else:
            transfer = seconds(Route("ring", (0, 1, 2, 3)), wires, size, 0)
        workers = RoundWorkers([1.0] * 4, factor * transfer, 0.0, overlapped=True)
        assert abs(needed_period(workers, 0.92) - period) <= 1, "the notes round, we round up"


workers = st.builds(
    RoundWorkers,
    st.lists(st.floats(0.01, 5.0), min_size=1, max_size=5),
    st.floats(0.0, 300.0),
    st.floats(0.0, 2.0),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(workers, st.floats(0.5, 0.97))
def test_smallest_period_reaches_the_target(workers: RoundWorkers, target: float) -> None:
    smallest = smallest_period(workers, target, busy_times(workers.step_s))
    for period in range(SHORTEST_PERIOD, smallest or LONGEST_PERIOD + 1):
        assert not is_enough(workers, period, target)
    if smallest is not None:
        assert is_enough(workers, smallest, target)
        assert smallest >= min(needed_period(workers, target), smallest)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=5), st.integers(1, 60))
def test_busy_times_agree_with_the_split(steps: list[float], period: int) -> None:
    round_times = round_of(RoundWorkers(steps, 0.0, 0.0, overlapped=False), period)
    if round_times is not None:
        assert busy_times(steps)[period - 1] == pytest.approx(round_times.busy_s)
        assert round_times.busy_s >= round_times.ideal_s * (1 - 1e-12)


def _rounds(plan_options: PlanLimits, mbps: float, parameters: int, speeds: tuple[float, ...]) -> list[Plan]:
    plans = make_plans(mesh(speeds, mbps), ModelSize(parameters=parameters), PROFILE, plan_options).plans
    all_machines = [plan for plan in plans if plan.kind == "local_steps" and len(plan.parts) == len(speeds)]
    return sorted(all_machines, key=lambda plan: (not plan.is_overlapped, plan.codec))


def test_codec_with_the_best_score_is_proposed() -> None:
    """A smaller codec costs some loss by itself, but allows shorter rounds."""
    options = PlanLimits(sync="auto")
    rounds = {
        plan.codec: plan for plan in _rounds(options, 150.0, 125_000_000, (100,) * 4) if plan.is_overlapped
    }
    assert period_limit(125_000_000) == 64
    assert rounds["bf16"].period > rounds["int8"].period > rounds["int4"].period
    assert [codec for codec, plan in rounds.items() if plan.is_allowed] == ["int4"]
    assert "int4 is better when speed and expected loss are combined" in rounds["bf16"].reason
    assert "int4 is better when speed and expected loss are combined" in rounds["topk"].reason
    assert "shorter rounds would leave less than 92% of the time" in rounds["int4"].reason


def test_slow_codec_is_not_worth_its_shorter_rounds() -> None:
    slow = tuple(
        msgspec.structs.replace(codec, mb_per_s=300.0) if codec.name == "int4" else codec for codec in LOSSY
    )
    options = PlanLimits(sync="auto", codecs=slow)
    rounds = {
        plan.codec: plan for plan in _rounds(options, 150.0, 125_000_000, (100,) * 4) if plan.is_overlapped
    }
    assert [codec for codec, plan in rounds.items() if plan.is_allowed] == ["int8"]
    assert rounds["int4"].quality.cost < rounds["int8"].quality.cost
    assert rounds["int4"].step_s > rounds["int8"].step_s


def test_too_long_rounds_are_proposed_with_a_warning() -> None:
    codecs = tuple(codec for codec in LOSSY if codec.name in ("bf16", "int8"))
    rounds = _rounds(PlanLimits(sync="auto", codecs=codecs), 60.0, 125_000_000, (100,) * 4)
    allowed = [plan for plan in rounds if plan.is_allowed and plan.is_overlapped]
    assert [plan.codec for plan in allowed] == ["int8"]
    assert "longer than the recommended 64" in allowed[0].reason
    hopeless = _rounds(PlanLimits(sync="auto", codecs=codecs), 1.0, 125_000_000, (100,) * 2)
    allowed = [plan for plan in hopeless if plan.is_allowed and plan.is_overlapped]
    assert [plan.period for plan in allowed] == [LONGEST_PERIOD]
    assert "needs rounds of at least" in allowed[0].reason
    assert allowed[0].utilisation < 0.92


def test_faster_machines_take_more_inner_steps() -> None:
    (plan,) = [
        plan
        for plan in _rounds(PlanLimits(sync="auto"), 940.0, 100_000_000, (40, 20, 10))
        if plan.is_overlapped and plan.is_allowed
    ]
    steps = [part.inner_steps or 0 for part in plan.parts]
    assert steps[0] == pytest.approx(4 * steps[2], rel=0.3)
    assert sum(steps) == 3 * plan.period
    assert plan.utilisation >= 0.9
    assert plan.outer is not None
    assert plan.outer.momentum == 0.5


def test_local_cost_follows_the_points_and_shrinks_with_size() -> None:
    curve = LocalCurve()
    for period, cost in curve.points:
        assert local_cost(curve, period, curve.parameters) == pytest.approx(cost)
    assert 0.028 < local_cost(curve, 35, curve.parameters) < 0.047
    assert local_cost(curve, 30, 2_400_000_000) == pytest.approx(0.012, abs=0.002)
    assert local_cost(curve, 50, 1_000_000) == 0.047, "for smaller models it is not believed to be better"
    assert local_cost(curve, 10_000, curve.parameters) == 0.094
    many = local_quality(curve, CODECS["int8"], 50, curve.parameters, workers=40)
    assert "more than 16 workers" in many.source
    with pytest.raises(ValueError, match="in order"):
        LocalCurve(points=((5, 0.1), (2, 0.0)))


def test_outer_rule_depends_on_codec_and_period() -> None:
    def momentum(period: int, *, is_lora: bool = False) -> float:
        return outer_rule(CODECS["int8"], period, is_lora=is_lora).momentum

    assert [momentum(period) for period in (2, 7, 8, 31, 32, 99, 100)] == [0.5, 0.5, 0.7, 0.7, 0.6, 0.6, 0.9]
    assert momentum(200, is_lora=True) == 0.0
    sparse = outer_rule(CODECS["topk"], 200, is_lora=False)
    assert (sparse.learning_rate, sparse.momentum, sparse.error_feedback) == (1.0, 0.0, 0.95)


def test_codec_names_are_unique() -> None:
    assert [codec.name for codec in ladder(LOSSY)] == ["bf16", "int8", "int4", "topk"]
    for codecs in ((LOSSY[0], LOSSY[0]), (PlanCodec(name="exact", bytes_per_parameter=1.0),)):
        with pytest.raises(ValueError, match="must be unique"):
            PlanLimits(codecs=codecs)


def test_ring_seconds_of_chunks() -> None:
    wires = LinkMatrix(mesh([1, 1], 8.0, latency_s=0.0))
    size = payload(CODECS["topk"], 1_000_000)
    hop = ring_hop_s((0, 1), wires, ring_piece(size, 2))
    assert ring_seconds(hop, 2, gathers=True) == pytest.approx(0.0273, rel=0.01)


def test_docs_page_has_the_figures_of_every_codec() -> None:
    page = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
    for codec in LOSSY:
        cost = f"{codec.step_cost * 100:g} %"
        assert f"| `{codec.name}` | {codec.bytes_per_parameter:g} | {codec.mb_per_s:g} | {cost}" in page
