"""Placement of the blocks of a model on machines, and its reasons."""

from __future__ import annotations

import pytest

from barnraise.core.errors import RunError
from barnraise.planning.split.placement import place_stages, predict_placement
from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.stage_placement import ModelParts, PartSize
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates

GIB = 1 << 30
GBIT = 1e9 / 8


def model(blocks: int = 12, block_bytes: int = GIB) -> ModelParts:
    small = PartSize(GIB // 4)
    return ModelParts(small, (PartSize(block_bytes, 1 << 20, 1 << 20),) * blocks, small, 1 << 20)


def machine(name: str, gib: float = 0.0, block_s: float = 0.0) -> SplitMachine:
    return SplitMachine(name, round(gib * GIB), BlockSpeed(block_s / 3, 2 * block_s / 3))


def problem(*machines: SplitMachine, parts: ModelParts | None = None, batches: int = 8) -> SplitProblem:
    count = range(len(machines))
    rates = tuple(tuple(GBIT if a != b else 0.0 for b in count) for a in count)
    latencies = tuple(tuple(0.0002 if a != b else 0.0 for b in count) for a in count)
    split = parts or model()
    return SplitProblem(split, machines, LinkRates(rates, latencies), batches, split.boundary_bytes)


def blocks_of(split: SplitProblem) -> dict[str, int]:
    """Return the number of blocks by machine."""
    placement = place_stages(split)
    return {
        split.machines[number].name: end - first
        for number, (first, end) in zip(placement.order, placement.runs, strict=True)
    }


def test_fast_machine_gets_more_blocks() -> None:
    assert blocks_of(problem(machine("slow", 0, 0.3), machine("fast", 0, 0.1))) == {"slow": 3, "fast": 9}


def test_memory_limits_a_fast_machine() -> None:
    assert blocks_of(problem(machine("slow", 64, 0.3), machine("fast", 6, 0.1))) == {"slow": 7, "fast": 5}


def test_slow_machine_has_no_blocks_and_the_reason_is_said() -> None:
    split = problem(machine("mac", 10, 0.1), machine("old", 64, 3.0), machine("pc", 10, 0.1))
    placement = place_stages(split)
    assert set(placement.order) == {0, 2}
    assert placement.run_of(1) is None
    (why,) = placement.why_spare
    assert why == (
        "old computes no blocks, because a step is shorter without it: a block takes 3 s there, and 100 ms "
        "on mac; it takes over if another machine is lost"
    )


def test_machine_without_memory_for_a_block_has_none() -> None:
    placement = place_stages(problem(machine("mac", 64, 0.1), machine("toy", 0.5, 0.1)))
    assert placement.order == (0,)
    assert placement.why_spare[0].startswith("toy computes no blocks, because a block needs 1.")


def test_fewer_blocks_than_machines_leave_machines_out() -> None:
    split = problem(*(machine(name) for name in "abc"), parts=model(2))
    placement = place_stages(split)
    assert len(placement.order) == 2
    assert "because the others are enough" in placement.why_spare[0]


def test_missing_memory_is_named() -> None:
    with pytest.raises(RunError, match=r"needs 12\.6 GiB.* 4\.5\d GiB more than all have.*mac 4 GiB, box"):
        place_stages(problem(machine("mac", 4), machine("box", 4)))


def test_block_that_fits_nowhere_is_named() -> None:
    split = problem(machine("mac", 9), machine("box", 9), parts=model(3, 5 * GIB + GIB // 2))
    with pytest.raises(RunError, match=r"do not fit .* in any order.* a block needs 5\.77"):
        place_stages(split)


def test_reasons_name_blocks_and_unknown_speeds() -> None:
    why = place_stages(problem(machine("mac", 9), machine("box", 9))).why
    assert why[0].startswith("mac computes blocks 1 to")
    assert "of 9 GiB" in why[0]
    assert why[2] == "the machines' speeds are not measured yet, so they count as equal"


def test_prediction_is_that_of_the_placement() -> None:
    split = problem(machine("slow", 0, 0.3), machine("fast", 0, 0.1))
    placement = place_stages(split)
    step = predict_placement(split, placement.order, placement.runs)
    other = predict_placement(split, (0, 1), ((0, 6), (6, 12)))
    assert step.step_s < other.step_s
    assert other.limit == "slow"


def test_machine_on_a_slow_line_is_left_out_because_of_the_exchange_of_gradients() -> None:
    """The search sees the passes only, which would be shorter with it."""
    parts = ModelParts(PartSize(0), (PartSize(GIB, 5 << 20, 1 << 20),) * 32, PartSize(0), 1 << 20)
    three = problem(*(machine(name, 24, 0.03) for name in ("a", "b", "c")), parts=parts, batches=16)
    slow = 50e6 / 8
    rates = tuple(tuple(0.0 if a == b else slow if 2 in (a, b) else GBIT for b in range(3)) for a in range(3))
    split = three._replace(links=three.links._replace(rates=rates))
    placement = place_stages(split)
    assert sorted(placement.order) == [0, 1]
    (why,) = placement.why_spare
    assert why == (
        "c computes no blocks, because a step is shorter without it: its links take longer than its "
        "computing would save; it takes over if another machine is lost"
    )


def test_model_that_fits_only_without_mirrors_is_placed_without() -> None:
    parts = ModelParts(PartSize(0), (PartSize(0, GIB),) * 12, PartSize(0), 1 << 20)
    pair = problem(machine("a", 36, 0.1), machine("b", 36, 0.1), parts=parts)
    placement = place_stages(pair)
    assert placement.run_of(0) is not None
    assert all(need <= 36 * GIB for need in placement.needs)
    with pytest.raises(RunError, match=r"a block needs 4\.02 GiB"):
        place_stages(problem(machine("a", 46, 0.1), machine("b", 3, 0.1), parts=parts))


def test_unmeasured_machine_counts_as_the_slowest_and_that_is_said() -> None:
    split = problem(machine("a", 12, 0.1), machine("b", 12, 0.3), machine("new", 12))
    placement = place_stages(split)
    assert "the speed of new is not measured, so it counts as the slowest" in placement.why
    assert split.speeds[2] == split.speeds[1]


def test_machine_that_is_too_small_for_a_block_does_not_take_over() -> None:
    (why,) = place_stages(problem(machine("a", 24, 0.1), machine("toy", 1, 0.1))).why_spare
    assert why.startswith("toy computes no blocks, because a block needs 1")
    assert "takes over" not in why
