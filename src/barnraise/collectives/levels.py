"""Which strategies a group takes where a person has fixed them by level of the network. Pure, torch-free.

What is open is chosen as for any group; sums that go through sites then take chains and a ring.
"""

from __future__ import annotations

from barnraise.collectives.algorithms.schedule import Kind, Shapes
from barnraise.planning.inputs.levels import AUTO, Levels


def setting_for(kind: str, levels: Levels, general: str, places: int) -> str:
    """What is set for an operation of a group at so many places; ``general``: for all operations."""
    inside = levels.inside
    fixed: str = AUTO
    if kind == Kind.ALL_REDUCE:
        fixed = "sites" if places > 1 and not levels.across.is_open else inside.all_reduce
    elif kind in (Kind.REDUCE, Kind.BROADCAST):
        fixed = inside.reduce if kind == Kind.REDUCE else inside.broadcast
    return general if fixed == AUTO else fixed


def shapes_of(levels: Levels) -> Shapes:
    fixed = (levels.inside.reduce, levels.across.all_reduce, levels.inside.broadcast)
    return Shapes(*("ring" if shape == AUTO else shape for shape in fixed))
