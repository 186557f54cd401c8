"""Hierarchical operations: each site has a leader, and only leaders exchange messages between sites.

An all-reduce sums to the leader of each site, all-reduces among the leaders, and broadcasts in each site. The
bytes between sites do not grow with the number of machines in a site. Segments pass through all three stages
in a pipeline, so the slow links between sites are always busy. Each stage has its own shape
(``StageShapes``): by default a chain to the leader, a ring of leaders, and the chain back.

Reduce and broadcast have two stages, and the root leads its own site. In a barrier each leader waits for its
site, then for the other leaders, and then releases its site.
"""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.collectives.algorithms.recursive_doubling import doubling_steps
from barnraise.collectives.algorithms.ring import pass_around, scatter_sums
from barnraise.collectives.algorithms.schedule import BufferLayout, Schedule, ScheduleBuilder, chunk_bounds
from barnraise.collectives.algorithms.tree import pass_down, sum_upwards, virtual_children, virtual_parent

Sites = tuple[tuple[int, ...], ...]


def all_reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    sites = _sites(world, layout)
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


def reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile sums to the leader of each site, and from the leaders to the root."""
    builder = ScheduleBuilder(layout.item, layout.segment)
    route = _route(rank, _sites(world, layout), layout, layout.shapes.reduce)
    sum_upwards(builder, *route, builder.cut(0, layout.sizes[0]))
    return builder.build()


def broadcast(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile a broadcast from the root to the leaders, and from each leader to its site."""
    builder = ScheduleBuilder(layout.item, layout.segment)
    route = _route(rank, _sites(world, layout), layout, layout.shapes.broadcast)
    pass_down(builder, *route, builder.cut(0, layout.sizes[0]))
    return builder.build()


def barrier(rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile a barrier: a star in each site, and a dissemination barrier among the leaders."""
    builder = ScheduleBuilder()
    sites = _sites(world, layout)
    position, (leader, *members) = next((place, site) for place, site in enumerate(sites) if rank in site)
    if rank != leader:
        builder.send_token(leader)
        builder.receive_token(leader)
        return builder.build()
    for member in members:
        builder.receive_token(member)
    for distance, _ in doubling_steps(len(sites)):
        builder.send_token(sites[(position + distance) % len(sites)][0])
        builder.receive_token(sites[(position - distance) % len(sites)][0])
    for member in members:
        builder.send_token(member)
    return builder.build()


def _sites(world: int, layout: BufferLayout) -> Sites:
    return layout.sites or tuple((member,) for member in range(world))


def _segments(builder: ScheduleBuilder, chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [segment for chunk in chunks for segment in builder.cut(*chunk)]


def _route(
    rank: int, sites: Sites, layout: BufferLayout, inside: str
) -> tuple[int | None, tuple[int, ...]]:
    """Return this rank's parent on the way to the root, and its children, those at other sites first."""
    root, arity = layout.root, layout.arity
    led = [(root, *(member for member in site if member != root)) if root in site else site for site in sites]
    home = next(place for place, site in enumerate(led) if site[0] == root)
    leaders = [site[0] for site in (*led[home:], *led[:home])]
    own_site = next(site for site in led if rank in site)
    above, below = _family(own_site, rank, inside, arity)
    if rank == own_site[0]:
        above, across = _family(leaders, rank, layout.shapes.across, arity)
        below = (*across, *below)
    return above, below


def _family(members: Sequence[int], rank: int, shape: str, arity: int) -> tuple[int | None, tuple[int, ...]]:
    """Return this rank's parent on the way to the first of ``members``, and its children."""
    fan = {"ring": 1, "tree": arity, "star": len(members)}[shape]
    place = list(members).index(rank)
    above = virtual_parent(place, fan)
    below = tuple(members[child] for child in virtual_children(place, fan, len(members)))
    return (None if above is None else members[above]), below
