"""Which strategies a group takes where a person has fixed them by level of the network. Pure, torch-free.

What is open is chosen as for any group; sums that go through sites then take chains and a ring.
"""

from __future__ import annotations

from barnraise.collectives.algorithms.schedule import BufferShapes, StepKind
from barnraise.planning.inputs.levels import AUTO, Levels


def setting_for(kind: str, levels: Levels, general: str, places: int) -> str:
    """What is set for an operation of a group at so many places; ``general``: for all operations."""
    inside = levels.inside
    fixed: str = AUTO
    if kind == StepKind.ALL_REDUCE:
        fixed = "sites" if places > 1 and not levels.across.is_open else inside.all_reduce
    elif kind in (StepKind.REDUCE, StepKind.BROADCAST):
        fixed = inside.reduce if kind == StepKind.REDUCE else inside.broadcast
    return general if fixed == AUTO else fixed


def shapes_of(levels: Levels) -> BufferShapes:
    fixed = (levels.inside.reduce, levels.across.all_reduce, levels.inside.broadcast)
    return BufferShapes(*("ring" if shape == AUTO else shape for shape in fixed))
