"""Hierarchical all-reduce: each site reduces to its leader, leaders all-reduce, and sites broadcast.

The bytes between sites do not grow with the number of machines in a site. Segments pass through all three
stages in a pipeline, so the slow links between sites are always busy. Each stage has its own shape
(``StageShapes``): by default a chain to the leader, a ring of leaders, and the chain back.
"""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.collectives.algorithms.ring import pass_around, scatter_sums
from barnraise.collectives.algorithms.schedule import BufferLayout, Schedule, ScheduleBuilder, chunk_bounds
from barnraise.collectives.algorithms.tree import pass_down, sum_upwards, virtual_children, virtual_parent


def all_reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    sites = layout.sites or tuple((member,) for member in range(world))
    leaders = [site[0] for site in sites]
    position, site = next((place, site) for place, site in enumerate(sites) if rank in site)
    is_ring = layout.shapes.across == "ring"
    parts = len(leaders) if is_ring else 1
    bounds = chunk_bounds(layout.sizes[0], parts, layout.item)
    chunks = [(bounds[part], bounds[part + 1]) for part in range(parts)]
    # Inwards: the order in which this site's leader forwards the chunks. Outwards: the leader's own chunk is
    # complete first, the others follow in the order of the ring.
    inwards = [chunks[(position - step - 1) % parts] for step in range(parts)]
    outwards = [chunks[(position - step) % parts] for step in range(parts)]
    sum_upwards(
        builder, *_family(site, rank, layout.shapes.reduce, layout.arity), _segments(builder, inwards)
    )
    if rank == site[0] and is_ring:
        scatter_sums(builder, leaders, position, chunks)
        pass_around(builder, leaders, position, chunks)
    elif rank == site[0]:
        family = _family(leaders, rank, layout.shapes.across, layout.arity)
        sum_upwards(builder, *family, _segments(builder, chunks))
        pass_down(builder, *family, _segments(builder, chunks))
    pass_down(
        builder, *_family(site, rank, layout.shapes.broadcast, layout.arity), _segments(builder, outwards)
    )
    return builder.build()


def _segments(builder: ScheduleBuilder, chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [segment for chunk in chunks for segment in builder.cut(*chunk)]


def _family(members: Sequence[int], rank: int, shape: str, arity: int) -> tuple[int | None, tuple[int, ...]]:
    """Return this rank's parent on the way to the first of ``members``, and its children."""
    fan = {"ring": 1, "tree": arity, "star": len(members)}[shape]
    place = list(members).index(rank)
    above = virtual_parent(place, fan)
    below = tuple(members[child] for child in virtual_children(place, fan, len(members)))
    return (None if above is None else members[above]), below
