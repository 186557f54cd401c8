"""Tree: a k-ary heap of ranks below the root. It has few steps, but inner ranks carry more than leaves.

Ranks are renumbered so that the root is virtual rank 0; the parent of v is (v - 1) // arity. Segments go up
and down in a pipeline, so a deep tree costs little more than a flat one for large buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from barnraise.collectives.algorithms.schedule import BufferLayout, Schedule, ScheduleBuilder
from barnraise.core.errors import ConfigError


def virtual_rank(rank: int, root: int, world: int) -> int:
    """Return the rank's number in the tree. The root has number 0."""
    return (rank - root) % world


def real_rank(virtual: int, root: int, world: int) -> int:
    return (virtual + root) % world


def virtual_parent(virtual: int, arity: int) -> int | None:
    return None if virtual == 0 else (virtual - 1) // arity


def virtual_children(virtual: int, arity: int, world: int) -> range:
    first = virtual * arity + 1
    return range(min(first, world), min(first + arity, world))


def depth(world: int, arity: int) -> int:
    """Return the number of steps from the root to the furthest rank."""
    steps, last = 0, world - 1
    while last > 0:
        last = (last - 1) // arity
        steps += 1
    return steps


def parent(rank: int, root: int, world: int, arity: int) -> int | None:
    above = virtual_parent(virtual_rank(rank, root, world), arity)
    return None if above is None else real_rank(above, root, world)


def children(rank: int, root: int, world: int, arity: int) -> tuple[int, ...]:
    below = virtual_children(virtual_rank(rank, root, world), arity, world)
    return tuple(real_rank(child, root, world) for child in below)


def all_reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile a reduce to the root, followed by a broadcast from it."""
    builder = _builder(layout)
    _up(builder, rank, world, layout)
    _down(builder, rank, world, layout)
    return builder.build()


def reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = _builder(layout)
    _up(builder, rank, world, layout)
    return builder.build()


def broadcast(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = _builder(layout)
    _down(builder, rank, world, layout)
    return builder.build()


def _builder(layout: BufferLayout) -> ScheduleBuilder:
    if layout.arity < 2:
        raise ConfigError(f"a tree of arity {layout.arity} never branches", hint="Use arity 2 or more.")
    return ScheduleBuilder(layout.item, layout.segment)


def _up(builder: ScheduleBuilder, rank: int, world: int, layout: BufferLayout) -> None:
    above = parent(rank, layout.root, world, layout.arity)
    below = children(rank, layout.root, world, layout.arity)
    sum_upwards(builder, above, below, builder.cut(0, layout.sizes[0]))


def _down(builder: ScheduleBuilder, rank: int, world: int, layout: BufferLayout) -> None:
    above = parent(rank, layout.root, world, layout.arity)
    below = children(rank, layout.root, world, layout.arity)
    pass_down(builder, above, below, builder.cut(0, layout.sizes[0]))


def sum_upwards(
    builder: ScheduleBuilder, above: int | None, below: Sequence[int], segments: Iterable[tuple[int, int]]
) -> None:
    """Add steps that receive and add each segment from the children, and send the sum to the parent."""
    for lo, hi in segments:
        for child in below:
            builder.reduce_segment(child, lo, hi)
        if above is not None:
            builder.send_segment(above, lo, hi)


def pass_down(
    builder: ScheduleBuilder, above: int | None, below: Sequence[int], segments: Iterable[tuple[int, int]]
) -> None:
    for lo, hi in segments:
        if above is not None:
            builder.place_segment(above, lo, hi)
        for child in below:
            builder.send_segment(child, lo, hi)
