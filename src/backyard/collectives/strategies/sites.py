"""Sites: each site sums along a chain to its leader, the leaders go around a ring, and the sum comes back.

What crosses between sites does not grow with the machines of a site. Segments follow one another through all
three stages, so the slow links between sites are busy from the first segment to the last.
"""

from __future__ import annotations

from backyard.collectives.program import Layout, Program, ProgramBuilder, chunk_bounds
from backyard.collectives.strategies.ring import pass_around, scatter_sums


def all_reduce(rank: int, world: int, layout: Layout) -> Program:
    builder = ProgramBuilder(layout.item, layout.segment)
    sites = layout.sites or tuple((one,) for one in range(world))
    leaders = [site[0] for site in sites]
    position, chain = next((place, site) for place, site in enumerate(sites) if rank in site)
    bounds = chunk_bounds(layout.sizes[0], len(leaders), layout.item)
    chunks = [(bounds[place], bounds[place + 1]) for place in range(len(leaders))]
    # In the order in which this site's leader sends them on.
    wanted = [chunks[(position - step - 1) % len(chunks)] for step in range(len(chunks))]
    place = chain.index(rank)
    towards = chain[place - 1] if place else None
    behind = chain[place + 1] if place + 1 < len(chain) else None
    pieces = [piece for chunk in wanted for piece in builder.cut(*chunk)]
    for lo, hi in pieces:
        if behind is not None:
            builder.reduce_piece(behind, lo, hi)
        if towards is not None:
            builder.send_piece(towards, lo, hi)
    if towards is None:
        scatter_sums(builder, leaders, position, chunks)
        pass_around(builder, leaders, position, chunks)
    # The leader's own chunk is whole first, then they come as the ring brings them.
    whole = [chunks[(position - step) % len(chunks)] for step in range(len(chunks))]
    for lo, hi in (piece for chunk in whole for piece in builder.cut(*chunk)):
        if towards is not None:
            builder.place_piece(towards, lo, hi)
        if behind is not None:
            builder.send_piece(behind, lo, hi)
    return builder.build()
