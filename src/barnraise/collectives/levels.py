"""Algorithms that the user fixed by network level. Pure and torch-free.

Operations without a fixed algorithm are chosen as in any group. Sums through sites then use chains and a
ring.
"""

from __future__ import annotations

from barnraise.collectives.algorithms.schedule import OperationKind, StageShapes
from barnraise.planning.inputs.levels import AUTO, Levels


def algorithm_setting(kind: str, levels: Levels, general: str, places: int) -> str:
    """Return the algorithm setting of an operation in a group at ``places`` places.

    ``general``: the setting for all operations.
    """
    inside = levels.inside
    fixed: str = AUTO
    if kind == OperationKind.ALL_REDUCE:
        fixed = "sites" if places > 1 and not levels.across.is_open else inside.all_reduce
    elif kind in (OperationKind.REDUCE, OperationKind.BROADCAST):
        fixed = inside.reduce if kind == OperationKind.REDUCE else inside.broadcast
    return general if fixed == AUTO else fixed


def shapes_of(levels: Levels) -> StageShapes:
    fixed = (levels.inside.reduce, levels.across.all_reduce, levels.inside.broadcast)
    return StageShapes(*("ring" if shape == AUTO else shape for shape in fixed))
