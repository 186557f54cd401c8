"""Cost of moving blocks, and placements that keep them where they are."""

from __future__ import annotations

import itertools

import pytest

from barnraise.planning.split.move_cost import HeldBlocks, move_shares, with_moves
from barnraise.planning.split.placement import place_stages, predict_placement
from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.stage_placement import ModelParts, PartSize, StagePlacement
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates

MIB = 1 << 20
BLOCKS = 12
SPEEDS = (0.1, 0.14, 0.17)


def problem(speeds: tuple[float, ...]) -> SplitProblem:
    count = range(len(speeds))
    parts = ModelParts(
        PartSize(200 * MIB), (PartSize(200 * MIB, MIB),) * BLOCKS, PartSize(200 * MIB), MIB // 16
    )
    machines = tuple(
        SplitMachine(str(number), 0, BlockSpeed(each / 3, 2 * each / 3)) for number, each in enumerate(speeds)
    )
    rates = tuple(tuple(0.0 if a == b else 1e8 for b in count) for a in count)
    latencies = tuple(tuple(0.0 if a == b else 2e-4 for b in count) for a in count)
    return SplitProblem(parts, machines, LinkRates(rates, latencies), 8, parts.boundary_bytes)


def blocks(placement: StagePlacement, machine: int) -> set[int]:
    run = placement.run_of(machine)
    return set(range(*run)) if run is not None else set()


def test_held_block_costs_nothing_and_a_mirrored_one_is_only_read() -> None:
    parts = problem(SPEEDS).parts
    shares = move_shares(parts, HeldBlocks({0}, {0, 1}))
    assert shares[0] == 0.0
    assert 0.0 < shares[1] < shares[2]
    assert len(set(shares[2:])) == 1


@pytest.mark.parametrize(("dead", "mirror"), [(0, 1), (1, 2), (1, 0), (2, 1)])
def test_survivors_keep_their_blocks_and_little_state_moves(dead: int, mirror: int) -> None:
    """The machine that mirrored the dead one takes what it has; nothing moves only to change the order."""
    before = place_stages(problem(SPEEDS))
    left = [number for number in range(3) if number != dead]
    held = [
        HeldBlocks(blocks(before, number), blocks(before, dead) if number == mirror else ())
        for number in left
    ]
    after = problem(SPEEDS).only(left)
    chosen = place_stages(with_moves(after, held))
    moved = sum(
        len(blocks(chosen, place) - {*each.computed, *each.trained}) for place, each in enumerate(held)
    )
    assert moved <= 1.1 * len(blocks(before, dead))
    best = place_stages(after)
    times = [predict_placement(after, each.order, each.runs).step_s for each in (chosen, best)]
    assert times[0] <= 1.02 * times[1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_placement_in_use_stays(order: tuple[int, ...]) -> None:
    """Three equal machines can be placed in any order, so they keep the one that they have."""
    runs = ((0, 4), (4, 8), (8, 12))
    held = [HeldBlocks(range(*runs[order.index(number)])) for number in range(3)]
    chosen = place_stages(with_moves(problem((0.1, 0.1, 0.1)), held))
    assert (chosen.order, chosen.runs) == (order, runs)
