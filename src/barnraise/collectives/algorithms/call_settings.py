"""Algorithm settings of one call. Pure and torch-free.

The block of the call comes first, then the network level, then the setting of the operation, then the one of
all operations. Sums through sites without fixed shapes use chains and a ring.
"""

from __future__ import annotations

from typing import NamedTuple

from barnraise.collectives.algorithms.schedule import OperationKind, StageShapes
from barnraise.collectives.per_call import CallOptions
from barnraise.core.config import (
    AllReduceSettings,
    BlockSettings,
    BroadcastSettings,
    CollectiveSettings,
    ReduceSettings,
)
from barnraise.planning.inputs.levels import AUTO, Levels

OperationSettings = AllReduceSettings | ReduceSettings | BroadcastSettings | BlockSettings


class AlgorithmSettings(NamedTuple):
    """Settings of one call. ``is_required``: the operation must have this algorithm."""

    strategy: str
    arity: int
    tree_below_bytes: int
    is_required: bool = False


def settings_of_call(
    kind: str, settings: CollectiveSettings, levels: Levels, places: int, options: CallOptions
) -> AlgorithmSettings:
    """Return the algorithm settings of an operation in a group at ``places`` places."""
    arity, tree_below_bytes = settings.arity, settings.tree_below_bytes
    own = _own_settings(kind, settings)
    if own is not None and not isinstance(own, BlockSettings):
        arity = arity if own.arity is None else own.arity
        tree_below_bytes = tree_below_bytes if own.tree_below_bytes is None else own.tree_below_bytes
    if options.arity is not None:
        arity = options.arity
    if options.tree_below_bytes is not None:
        tree_below_bytes = options.tree_below_bytes
    if options.strategy is not None:
        return AlgorithmSettings(options.strategy, arity, tree_below_bytes, is_required=True)
    fixed = _level_strategy(kind, levels, places)
    strategy = strategy_of_operation(kind, settings) if fixed == AUTO else fixed
    return AlgorithmSettings(strategy, arity, tree_below_bytes)


def strategy_of_operation(kind: str, settings: CollectiveSettings) -> str:
    """Return the strategy that the settings give an operation."""
    own = _own_settings(kind, settings)
    return own.strategy if own is not None and own.strategy is not None else settings.strategy


def shapes_of(levels: Levels) -> StageShapes:
    fixed = (levels.inside.reduce, levels.across.all_reduce, levels.inside.broadcast)
    return StageShapes(*("ring" if shape == AUTO else shape for shape in fixed))


def _own_settings(kind: str, settings: CollectiveSettings) -> OperationSettings | None:
    own: dict[str, OperationSettings] = {
        OperationKind.ALL_REDUCE: settings.all_reduce,
        OperationKind.REDUCE: settings.reduce,
        OperationKind.BROADCAST: settings.broadcast,
        OperationKind.ALL_GATHER: settings.all_gather,
        OperationKind.REDUCE_SCATTER: settings.reduce_scatter,
    }
    return own.get(kind)


def _level_strategy(kind: str, levels: Levels, places: int) -> str:
    inside = levels.inside
    if kind == OperationKind.ALL_REDUCE:
        return "sites" if places > 1 and not levels.across.is_open else inside.all_reduce
    if kind == OperationKind.REDUCE:
        return inside.reduce
    return inside.broadcast if kind == OperationKind.BROADCAST else AUTO
