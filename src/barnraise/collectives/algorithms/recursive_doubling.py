"""Recursive halving and doubling: few steps, and no byte passes a port more often than necessary.

Reduce-scatter halves the unfinished range in every step, all-gather doubles the known range. Partners are
at distances of powers of two modulo N, so any world size works and no rank is folded away. An all-reduce
does both: 2 (N-1)/N of the buffer through every port, like the ring, but in 2 ceil(log2 N) steps.

``exchange`` is for small messages: partners swap the whole buffer, in ceil(log2 N) steps. Ranks beyond the
largest power of two fold into a partner first and receive the result from it at the end.
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
    _halve(builder, rank, world, bounds)
    _double(builder, rank, world, bounds)
    return builder.build()


def reduce_scatter(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    _halve(builder, rank, world, block_bounds(layout.sizes))
    return builder.build()


def all_gather(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    _double(builder, rank, world, block_bounds(layout.sizes))
    return builder.build()


def barrier(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile a dissemination barrier.

    After ceil(log2 N) rounds of empty messages every rank has heard from all ranks.
    """
    builder = ScheduleBuilder()
    for distance, _ in doubling_steps(world):
        builder.send_token((rank + distance) % world)
        builder.receive_token((rank - distance) % world)
    return builder.build()


def exchange(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile recursive doubling of the whole buffer. Every rank computes the same sums in the same order."""
    builder = ScheduleBuilder(layout.item, layout.segment)
    segments = builder.cut(0, layout.sizes[0])
    power = 1 << (world.bit_length() - 1)
    if rank >= power:
        for lo, hi in segments:
            builder.send_segment(rank - power, lo, hi)
        for lo, hi in segments:
            builder.place_segment(rank - power, lo, hi)
        return builder.build()
    folded = rank + power if rank + power < world else None
    if folded is not None:
        for lo, hi in segments:
            builder.reduce_segment(folded, lo, hi)
    distance = 1
    while distance < power:
        partner = rank ^ distance
        for lo, hi in segments:
            sent = builder.send_segment(partner, lo, hi)
            # The partner does not wait for our message, so it must be read before we add.
            builder.reduce_segment(partner, lo, hi, after_sends=(sent,), incoming_first=partner < rank)
        distance *= 2
    if folded is not None:
        for lo, hi in segments:
            builder.send_segment(folded, lo, hi)
    return builder.build()


def doubling_steps(world: int) -> tuple[tuple[int, int], ...]:
    """Return (distance, blocks moved) of each step. The known blocks double until all are known."""
    steps = []
    known = 1
    while known < world:
        steps.append((known, min(known, world - known)))
        known *= 2
    return tuple(steps)


def _double(builder: ScheduleBuilder, rank: int, world: int, bounds: Sequence[int]) -> None:
    """Add all-gather steps: a rank sends the ``count`` blocks it knows and receives the next ``count``."""
    for distance, count in doubling_steps(world):
        for lo, hi in _circle_ranges(rank, count, world, bounds):
            builder.send((rank - distance) % world, lo, hi)
        ahead = (rank + distance) % world
        for lo, hi in _circle_ranges(ahead, count, world, bounds):
            builder.place(ahead, lo, hi)


def _halve(builder: ScheduleBuilder, rank: int, world: int, bounds: Sequence[int]) -> None:
    """Add reduce-scatter steps: the messages of ``_double`` in reverse order, added instead of placed."""
    for distance, count in reversed(doubling_steps(world)):
        ahead = (rank + distance) % world
        for lo, hi in _circle_ranges(ahead, count, world, bounds):
            builder.send(ahead, lo, hi)
        for lo, hi in _circle_ranges(rank, count, world, bounds):
            builder.reduce((rank - distance) % world, lo, hi)


def _circle_ranges(first: int, count: int, world: int, bounds: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return ``count`` blocks from ``first`` on, modulo ``world``, as one or two ranges of bytes.

    The furthest blocks come first, because halving forwards those first.
    """
    end = first + count
    if end <= world:
        return ((bounds[first], bounds[end]),)
    return ((bounds[0], bounds[end - world]), (bounds[first], bounds[world]))
