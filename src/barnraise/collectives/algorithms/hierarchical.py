"""Sites: each site sums towards its leader, the leaders sum among themselves, and the sum comes back.

What crosses between sites does not grow with the machines of a site. Segments follow one another through all
three stages, so the slow links between sites are busy from the first segment to the last. Each stage has a
shape of its own (`Shapes`): by default a chain to the leader, a ring of leaders, and the chain back.
"""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.collectives.algorithms.ring import pass_around, scatter_sums
from barnraise.collectives.algorithms.schedule import BufferLayout, Schedule, ScheduleBuilder, chunk_bounds
from barnraise.collectives.algorithms.tree import pass_down, sum_upwards, virtual_children, virtual_parent


def all_reduce(rank: int, world: int, layout: BufferLayout) -> Schedule:
    builder = ScheduleBuilder(layout.item, layout.segment)
    sites = layout.sites or tuple((one,) for one in range(world))
    leaders = [site[0] for site in sites]
    position, site = next((place, site) for place, site in enumerate(sites) if rank in site)
    goes_around = layout.shapes.across == "ring"
    parts = len(leaders) if goes_around else 1
    bounds = chunk_bounds(layout.sizes[0], parts, layout.item)
    chunks = [(bounds[part], bounds[part + 1]) for part in range(parts)]
    # Inwards in the order in which this site's leader sends them on; of what comes back from a ring, the
    # leader's own chunk is whole first, and then they come as the ring brings them.
    inwards = [chunks[(position - step - 1) % parts] for step in range(parts)]
    outwards = [chunks[(position - step) % parts] for step in range(parts)]
    sum_upwards(builder, *_family(site, rank, layout.shapes.reduce, layout.arity), _pieces(builder, inwards))
    if rank == site[0] and goes_around:
        scatter_sums(builder, leaders, position, chunks)
        pass_around(builder, leaders, position, chunks)
    elif rank == site[0]:
        family = _family(leaders, rank, layout.shapes.across, layout.arity)
        sum_upwards(builder, *family, _pieces(builder, chunks))
        pass_down(builder, *family, _pieces(builder, chunks))
    pass_down(
        builder, *_family(site, rank, layout.shapes.broadcast, layout.arity), _pieces(builder, outwards)
    )
    return builder.build()


def _pieces(builder: ScheduleBuilder, chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [piece for chunk in chunks for piece in builder.cut(*chunk)]


def _family(members: Sequence[int], rank: int, shape: str, arity: int) -> tuple[int | None, tuple[int, ...]]:
    """Who is before this rank on the way to the first of ``members``, and who is behind it."""
    fan = {"ring": 1, "tree": arity, "star": len(members)}[shape]
    place = list(members).index(rank)
    above = virtual_parent(place, fan)
    below = tuple(members[one] for one in virtual_children(place, fan, len(members)))
    return (None if above is None else members[above]), below
