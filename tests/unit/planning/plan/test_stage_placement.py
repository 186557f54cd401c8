"""Placement of the blocks of a model on machines."""

from __future__ import annotations

import itertools

import pytest

from barnraise.core.errors import RunError
from barnraise.planning.plan.stage_placement import (
    ModelParts,
    PartSize,
    StageMachine,
    fits_alone,
    place_stages,
    stage_bytes,
)

GIB = 1 << 30


def model(blocks: int = 12, block_bytes: int = GIB) -> ModelParts:
    small = PartSize(GIB // 4)
    return ModelParts(small, (PartSize(block_bytes, 1 << 20, 1 << 20),) * blocks, small, 1 << 20)


def lengths(parts: ModelParts, machines: list[StageMachine]) -> list[int]:
    runs = place_stages(parts, machines, 8).runs
    assert runs[0][0] == 0
    assert runs[-1][1] == len(parts.blocks)
    assert all(end == first for (_, end), (first, _) in itertools.pairwise(runs))
    return [end - first for first, end in runs]


def test_fast_machine_gets_more_blocks() -> None:
    machines = [StageMachine("slow", 0, 0.3), StageMachine("fast", 0, 0.1)]
    assert lengths(model(), machines) == [3, 9]


def test_memory_limits_a_fast_machine() -> None:
    machines = [StageMachine("slow", 64 * GIB, 0.3), StageMachine("fast", 6 * GIB, 0.1)]
    assert lengths(model(), machines) == [7, 5]


def test_slowest_stage_is_as_fast_as_any_placement_allows() -> None:
    speeds = (0.2, 0.7, 0.35)
    machines = [StageMachine(str(place), 5 * GIB + place * GIB, speed) for place, speed in enumerate(speeds)]
    parts = model(9)

    def slowest(sizes: tuple[int, ...]) -> float:
        firsts = [sum(sizes[:place]) for place in range(3)]
        for place, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
            if (
                stage_bytes(parts, first, first + size, stages=3, place=place, batches=8)
                > machines[place].memory_bytes
            ):
                return float("inf")
        return max((size + (place == 2)) * speeds[place] for place, size in enumerate(sizes))

    candidates = [sizes for sizes in itertools.product(range(1, 9), repeat=3) if sum(sizes) == 9]
    best = min(map(slowest, candidates))
    chosen = lengths(parts, machines)
    assert slowest((chosen[0], chosen[1], chosen[2])) == pytest.approx(best)


def test_missing_memory_is_named() -> None:
    machines = [StageMachine("mac", 4 * GIB), StageMachine("box", 4 * GIB)]
    with pytest.raises(RunError, match=r"needs 12\.6 GiB.* 4\.5\d GiB more than all have.*mac 4 GiB, box"):
        place_stages(model(), machines, 8)


def test_block_that_fits_nowhere_is_named() -> None:
    machines = [StageMachine("mac", 9 * GIB), StageMachine("box", 9 * GIB)]
    with pytest.raises(RunError, match=r"do not fit .* a block has 5\.5 GiB"):
        place_stages(model(3, 5 * GIB + GIB // 2), machines, 8)


def test_fewer_blocks_than_machines_are_refused() -> None:
    with pytest.raises(RunError, match="2 blocks cannot be split over 3 machines"):
        place_stages(model(2), [StageMachine(name) for name in "abc"], 8)


def test_reasons_name_blocks_and_a_machine_that_is_enough() -> None:
    machines = [StageMachine("mac", 64 * GIB), StageMachine("box", 9 * GIB)]
    assert fits_alone(model(), machines[0], 8)
    why = place_stages(model(), machines, 8).why
    assert why[0].startswith("mac computes blocks 1 to")
    assert "speeds are not measured yet" in why[2]
    assert why[3] == "the model fits on mac alone, which may be faster than a split"
