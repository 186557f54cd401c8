"""Ring: every rank sends to the next rank and receives from the previous one; best use of bandwidth.

An all-reduce moves 2 (N-1)/N of the buffer through every port, in 2 (N-1) steps. Each segment is forwarded
as soon as it is received, so the steps overlap and the links never idle. Reduce and broadcast are pipelined
chains along the ring that end or start at the root.
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
from barnraise.collectives.algorithms.tree import pass_down, sum_upwards


def all_reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    bounds = chunk_bounds(layout.sizes[0], world, layout.item)
    ring = _ring_order(world, layout)
    chunks = [(bounds[position], bounds[position + 1]) for position in range(world)]
    scatter_sums(builder, ring, ring.index(rank), chunks)
    pass_around(builder, ring, ring.index(rank), chunks)
    return builder.build()


def reduce_scatter(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    ring = _ring_order(world, layout)
    scatter_sums(builder, ring, ring.index(rank), _blocks_along(ring, layout))
    return builder.build()


def all_gather(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    ring = _ring_order(world, layout)
    pass_around(builder, ring, ring.index(rank), _blocks_along(ring, layout))
    return builder.build()


def reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile a chain towards the root: each rank adds its values and forwards the sum, by segments."""
    builder = ScheduleBuilder(layout.item, layout.segment)
    sum_upwards(builder, *_chain_neighbours(rank, world, layout), builder.cut(0, layout.sizes[0]))
    return builder.build()


def broadcast(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile a chain from the root: each rank forwards the received values, by segments."""
    builder = ScheduleBuilder(layout.item, layout.segment)
    pass_down(builder, *_chain_neighbours(rank, world, layout), builder.cut(0, layout.sizes[0]))
    return builder.build()


def _ring_order(world: int, layout: BufferLayout) -> tuple[int, ...]:
    return layout.order or tuple(range(world))


def _blocks_along(ring: Sequence[int], layout: BufferLayout) -> list[tuple[int, int]]:
    """Return each rank's block, in the order of the ring."""
    bounds = block_bounds(layout.sizes)
    return [(bounds[rank], bounds[rank + 1]) for rank in ring]


def scatter_sums(
    builder: ScheduleBuilder, ring: Sequence[int], position: int, chunks: Sequence[tuple[int, int]]
) -> None:
    """Add a reduce-scatter: the chunk at this rank's position is complete after it.

    Every other chunk is sent once.
    """
    world = len(ring)
    before, following = ring[position - 1], ring[(position + 1) % world]
    for step in range(world - 1):
        builder.send(following, *chunks[(position - step - 1) % world])
        builder.reduce(before, *chunks[(position - step - 2) % world])


def pass_around(
    builder: ScheduleBuilder, ring: Sequence[int], position: int, chunks: Sequence[tuple[int, int]]
) -> None:
    """Add an all-gather: every rank starts with the chunk at its own position and ends with all chunks."""
    world = len(ring)
    before, following = ring[position - 1], ring[(position + 1) % world]
    for step in range(world - 1):
        builder.send(following, *chunks[(position - step) % world])
        builder.place(before, *chunks[(position - step - 1) % world])


def _chain_neighbours(rank: int, world: int, layout: BufferLayout) -> tuple[int | None, tuple[int, ...]]:
    """Return the neighbour towards the root and the one behind. The chain is the ring, cut at the root."""
    ring = _ring_order(world, layout)
    start = ring.index(layout.root)
    distance = (ring.index(rank) - start) % world
    towards = ring[(start + distance - 1) % world] if distance > 0 else None
    behind = (ring[(start + distance + 1) % world],) if distance < world - 1 else ()
    return towards, behind
