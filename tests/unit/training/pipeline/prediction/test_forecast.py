"""Forecast of a split training: the prediction after a placement, in words and in the record."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from barnraise.history.entries import PHASES
from barnraise.planning.split.replica_placement import SplitPlacement
from barnraise.planning.split.stage_placement import ModelParts, PartSize, StagePlacement
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.pipeline.prediction.forecast import SplitForecast
from barnraise.training.pipeline.prediction.group_speeds import GroupSpeeds, MemberSpeed
from barnraise.training.pipeline.prediction.kept_activations import KeptBytes, with_kept

PARTS = ModelParts(PartSize(0), (PartSize(1000, 10),) * 6, PartSize(0), 4_000_000)
LINKS = LinkRates(((1e9, 1e7), (2e7, 1e9)), ((0.0, 0.001), (0.003, 0.0)))


class TwoMachines(SingleWorkerManager):
    world = 2

    def name_of(self, rank: int) -> str:
        return ("mac", "nas")[rank]


def predict(made: SplitForecast) -> None:
    made.predict(made.problem([0, 0], 8), SplitPlacement((StagePlacement((0, 1), ((0, 3), (3, 6))),)), 5)


def forecast(*members: MemberSpeed, links: LinkRates = LINKS) -> SplitForecast:
    made = SplitForecast(TwoMachines(), PARTS, "1F1B", 1_000_000)
    made.group = GroupSpeeds(members, links)
    return made


def test_placement_is_predicted_with_reasons_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    made = forecast(MemberSpeed(0.1, 0.2), MemberSpeed(0.2, 0.4))
    with caplog.at_level(logging.WARNING, "barnraise.training"):
        predict(made)
    plan = made.plan
    assert plan is not None
    assert plan.step.limit == "nas"
    assert plan.step.bound_s == pytest.approx(8 * 3 * 0.6)
    (line,) = caplog.messages
    assert line == f"predicted: {plan.step.sentence}"
    assert "nas computes longest" in line
    assert plan.planned.step_s == plan.step.step_s
    assert sum(plan.planned.phases_s) == pytest.approx(plan.step.step_s)
    assert len(plan.planned.phases_s) == len(PHASES)


def test_machine_without_figures_counts_as_the_mean_of_the_others() -> None:
    made = forecast(MemberSpeed(0.1, 0.2), MemberSpeed())
    predict(made)
    assert made.plan is not None
    assert made.plan.step.busy_s == pytest.approx((7.2, 7.2))


def test_without_any_figures_nothing_is_predicted(caplog: pytest.LogCaptureFixture) -> None:
    made = forecast(MemberSpeed(0.1, 0.2), MemberSpeed())
    predict(made)
    made.group = GroupSpeeds((MemberSpeed(), MemberSpeed()), LINKS)
    caplog.clear()
    predict(made)
    assert made.plan is None
    assert caplog.messages == []


def test_measured_steps_replace_the_probe_without_the_parts_at_the_ends() -> None:
    made = forecast(MemberSpeed(), MemberSpeed())
    made.block = BlockSpeed(0.1, 0.2, 0.05, 0.6, 0.01)
    made.note_step(8 * (3 * 0.6 + 0.6 + 0.01), 8, (3, 6))
    assert made.block == pytest.approx((0.2, 0.4, 0.05, 0.6, 0.01))
    made = forecast(MemberSpeed(), MemberSpeed())
    made.block = BlockSpeed(0.1, 0.2, 0.05, 0.6, 0.01)
    made.note_step(8 * 0.1, 8, (3, 6))  # much less than what the probe said of the head
    assert made.block.block_s == pytest.approx(0.025 / 3)


def test_speed_of_a_machine_is_the_median_of_its_newest_steps() -> None:
    made = forecast(MemberSpeed(), MemberSpeed())
    for seconds in (9.0, 0.3, 0.2, 0.3, 5.0, 0.3):
        made.note_step(8 * 3 * seconds, 8, (0, 3))
    assert made.block == pytest.approx((0.1, 0.2, 0.0, 0.0, 0.0))


def test_unmeasured_block_takes_a_third_of_its_time_forward() -> None:
    made = forecast(MemberSpeed(), MemberSpeed())
    made.note_step(2.4, 8, (0, 1))
    assert made.block == pytest.approx((0.1, 0.2, 0.0, 0.0, 0.0))


def test_member_that_reports_huge_activations_counts_as_four_times_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else the model would fit nowhere, and all would wait."""

    class Reporting(TwoMachines):
        def machines(self) -> tuple[str, ...]:
            return ("one machine", "one machine")  # no link is measured

    def gather(message: bytes) -> list[bytes]:
        reported = msgspec.msgpack.decode(message, type=MemberSpeed)
        lie = replace(reported, block_kept_bytes=1 << 50, after_kept_bytes=1 << 50)
        return [message, msgspec.msgpack.encode(lie)]

    manager = Reporting()
    manager.group = SimpleNamespace(all_gather_bytes=gather)  # type: ignore[assignment]
    made = SplitForecast(manager, with_kept(PARTS, KeptBytes(5_000_000, 100)), "1F1B", 1_000_000)
    made.exchange()
    assert {block.activation_bytes for block in made.parts.blocks} == {20_000_000}
    assert made.parts.after.activation_bytes == 400
    assert caplog.messages == ["nas reports much larger activations than the others; four times theirs count"]
