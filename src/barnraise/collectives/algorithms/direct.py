"""Direct: every pair of ranks exchanges one message per phase, all at the same time.

In shift s every rank sends to the rank s ahead and receives from the rank s behind. At any moment each port
serves one sender and one receiver. The bytes are those of the ring; there are one or two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.collectives.algorithms.schedule import (
    BufferLayout,
    Schedule,
    ScheduleBuilder,
    block_bounds,
    chunk_bounds,
)


def all_reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    bounds = chunk_bounds(layout.sizes[0], world, layout.item)
    _sum_own(builder, rank, world, bounds)
    _spread_own(builder, rank, world, bounds)
    return builder.build()


def reduce_scatter(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    _sum_own(builder, rank, world, block_bounds(layout.sizes))
    return builder.build()


def all_gather(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    _spread_own(builder, rank, world, block_bounds(layout.sizes))
    return builder.build()


def all_to_all(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile an all_to_all operation. The work buffer holds the input, then the output.

    The rank's block for itself is not moved here.
    """
    builder = ScheduleBuilder(layout.item, layout.segment)
    bounds = block_bounds(layout.sizes)
    for shift in range(1, world):
        ahead, behind = (rank + shift) % world, (rank - shift) % world
        builder.send(ahead, bounds[ahead], bounds[ahead + 1])
        builder.place(behind, bounds[world + behind], bounds[world + behind + 1])
    return builder.build()


def _sum_own(builder: ScheduleBuilder, rank: int, world: int, bounds: Sequence[int]) -> None:
    for shift in range(1, world):
        ahead = (rank + shift) % world
        builder.send(ahead, bounds[ahead], bounds[ahead + 1])
        builder.reduce((rank - shift) % world, bounds[rank], bounds[rank + 1])


def _spread_own(builder: ScheduleBuilder, rank: int, world: int, bounds: Sequence[int]) -> None:
    for shift in range(1, world):
        behind = (rank - shift) % world
        builder.send((rank + shift) % world, bounds[rank], bounds[rank + 1])
        builder.place(behind, bounds[behind], bounds[behind + 1])
