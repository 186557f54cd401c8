"""Placement of full replicas beside a pipeline."""

from __future__ import annotations

import pytest

from barnraise.planning.split.replica_placement import (
    PipelineTime,
    SplitPlacement,
    place_pipelines,
    predict_pipelines,
)
from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.stage_placement import ModelParts, PartSize, StagePlacement
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates

GIB = 1 << 30
GBIT = 1e9 / 8


def problem(*machines: tuple[str, float, float], trained: int = 1 << 20, rate: float = GBIT) -> SplitProblem:
    """Return a model of twelve blocks of 1 GiB on machines: name, memory in GiB, seconds of a block."""
    parts = ModelParts(PartSize(0), (PartSize(GIB, trained),) * 12, PartSize(0), 1 << 20)
    count = range(len(machines))
    rates = tuple(tuple(rate if a != b else 0.0 for b in count) for a in count)
    latencies = tuple(tuple(0.0002 if a != b else 0.0 for b in count) for a in count)
    made = tuple(
        SplitMachine(name, round(gib * GIB), BlockSpeed(block_s / 3, 2 * block_s / 3))
        for name, gib, block_s in machines
    )
    return SplitProblem(parts, made, LinkRates(rates, latencies), 16, parts.boundary_bytes)


HOME = (("pc", 24, 0.05), ("a", 6, 0.1), ("b", 6, 0.1), ("c", 6, 0.1))


def test_strong_machine_is_a_replica_beside_the_weak_ones() -> None:
    home = problem(*HOME)
    placement = place_pipelines(home)
    assert placement.pipelines[0].order == (0,)
    assert sorted(placement.pipelines[1].order) == [1, 2, 3]
    assert placement.run_of(0) == (0, 12)
    assert [placement.pipeline_of(machine) for machine in range(4)] == [0, 1, 1, 1]
    single = SplitPlacement((StagePlacement((0,), ((0, 12),)),))
    assert predict_pipelines(home, placement).step_s < predict_pipelines(home, single).step_s
    assert any(line.startswith("pc is a full replica and trains ") for line in placement.why)
    assert any("are one pipeline and train " in line for line in placement.why)
    assert "the replicas exchange gradients" in predict_pipelines(home, placement).why[-1]


def test_micro_batches_are_divided_so_that_all_end_early() -> None:
    stages = StagePlacement((0,), ((0, 1),))
    placement = SplitPlacement((stages, stages), (PipelineTime(1.0, 1.0), PipelineTime(4.0, 0.5)))
    assert placement.divide(1) == (range(1), range(1, 1))
    assert placement.divide(4) == (range(4), range(4, 4))
    shares = placement.divide(20)
    assert [len(share) for share in shares] == [9, 11]
    assert [number for share in shares for number in share] == list(range(20))


def test_weak_machines_that_do_not_hold_the_model_are_spares() -> None:
    home = problem(("pc", 24, 0.05), ("mac", 24, 0.05), ("toy", 1, 0.1))
    placement = place_pipelines(home._replace(batches=4))
    assert [each.order for each in placement.pipelines] == [(0,), (1,)]
    assert placement.why_spare[0].startswith("toy computes no blocks, because a block needs")
    home = problem(("pc", 24, 0.05), ("toy", 1, 0.1), ("tiny", 1, 0.1), ("mac", 24, 0.05))
    for line in place_pipelines(home._replace(batches=4)).why_spare:
        assert "computes no blocks, because " in line


def test_slow_links_and_much_to_exchange_leave_one_pipeline() -> None:
    placement = place_pipelines(problem(*HOME, trained=GIB // 4, rate=1e6))
    assert len(placement.pipelines) == 1


def test_unknown_speeds_leave_one_pipeline() -> None:
    placement = place_pipelines(problem(("pc", 24, 0.0), ("mac", 24, 0.0)))
    assert len(placement.pipelines) == 1
    assert placement.divide(8) == (range(8),)


@pytest.mark.parametrize("machines", [HOME[1:], HOME[:2]])
def test_without_two_ways_to_hold_the_model_there_is_one_pipeline(
    machines: tuple[tuple[str, float, float], ...],
) -> None:
    assert len(place_pipelines(problem(*machines)).pipelines) == 1
