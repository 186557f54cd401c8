"""Cost of moving blocks: what a machine reads and receives before it can compute a block. Pure.

A placement lasts for many steps, so moving adds little to each of them. It decides between placements that
are about as fast: then the machines keep their blocks, and a block goes to a machine that mirrors it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from barnraise.planning.split.split_problem import SplitProblem
from barnraise.planning.split.stage_placement import ModelParts

_READ_RATE = 500e6  # bytes per second from a disk
_LINE_RATE = 100e6  # bytes per second between machines
_STATE = 3  # values of what is trained: the parameter, and both moments of Adam
_STEPS = 200  # of a placement


class HeldBlocks(NamedTuple):
    """Blocks of a machine. ``trained``: those whose trained state it has besides, such as a mirror's."""

    computed: Collection[int] = ()
    trained: Collection[int] = ()


def move_shares(parts: ModelParts, held: HeldBlocks) -> tuple[float, ...]:
    """Return for each block the seconds that moving it to a machine adds to a step."""
    shares = []
    for number, block in enumerate(parts.blocks):
        seconds = 0.0
        if number not in held.computed:
            seconds += block.frozen_bytes / _READ_RATE
            if number not in held.trained:
                seconds += _STATE * block.trained_bytes / _LINE_RATE
        shares.append(seconds / _STEPS)
    return tuple(shares)


def with_moves(problem: SplitProblem, held: Sequence[HeldBlocks]) -> SplitProblem:
    """Return the problem with the cost of moving blocks; ``held``: by machine."""
    machines = (
        machine._replace(move_s=move_shares(problem.parts, each))
        for machine, each in zip(problem.machines, held, strict=True)
    )
    return problem._replace(machines=tuple(machines))


def moving_seconds(problem: SplitProblem, order: Sequence[int], runs: Sequence[tuple[int, int]]) -> float:
    """Return the seconds that the moves to some stages add to a step."""
    return math.fsum(
        seconds
        for number, (first, end) in zip(order, runs, strict=True)
        for seconds in problem.machines[number].move_s[first:end]
    )
