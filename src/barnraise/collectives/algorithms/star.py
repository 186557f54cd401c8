"""Star: all data passes through the root, in the fewest steps. The root's port carries all traffic.

The star suits very small groups and messages. Gather and scatter are always stars.
"""

from __future__ import annotations

from barnraise.collectives.algorithms.schedule import BufferLayout, Schedule, ScheduleBuilder, block_bounds
from barnraise.collectives.algorithms.tree import pass_down, sum_upwards


def all_reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    _inward(builder, rank, world, layout)
    _outward(builder, rank, world, layout)
    return builder.build()


def reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    _inward(builder, rank, world, layout)
    return builder.build()


def broadcast(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    _outward(builder, rank, world, layout)
    return builder.build()


def gather(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile a gather operation. The root's work buffer holds all blocks, each other rank's one block."""
    builder = ScheduleBuilder(layout.item, layout.segment)
    if rank != layout.root:
        builder.send(layout.root, 0, layout.sizes[rank])
        return builder.build()
    bounds = block_bounds(layout.sizes)
    for peer in _others(rank, world):
        builder.place(peer, bounds[peer], bounds[peer + 1])
    return builder.build()


def scatter(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile a scatter operation. The root's work buffer holds all blocks, each other rank's one block."""
    builder = ScheduleBuilder(layout.item, layout.segment)
    if rank != layout.root:
        builder.place(layout.root, 0, layout.sizes[rank])
        return builder.build()
    bounds = block_bounds(layout.sizes)
    for peer in _others(rank, world):
        builder.send(peer, bounds[peer], bounds[peer + 1])
    return builder.build()


def _inward(builder: ScheduleBuilder, rank: int, world: int, layout: BufferLayout) -> None:
    sum_upwards(builder, *_family(rank, world, layout), builder.cut(0, layout.sizes[0]))


def _outward(builder: ScheduleBuilder, rank: int, world: int, layout: BufferLayout) -> None:
    pass_down(builder, *_family(rank, world, layout), builder.cut(0, layout.sizes[0]))


def _family(rank: int, world: int, layout: BufferLayout) -> tuple[int | None, list[int]]:
    return (None, _others(rank, world)) if rank == layout.root else (layout.root, [])


def _others(rank: int, world: int) -> list[int]:
    return [(rank + shift) % world for shift in range(1, world)]
