"""Strategies: pure compilers from (operation, rank, world, sizes) to a ``Schedule``, one file each.

Imports nothing but the standard library, ``program`` and the error tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType

from barnraise.collectives.algorithms import direct, hierarchical, recursive_doubling, ring, star, tree
from barnraise.collectives.algorithms.schedule import (
    CHAINS,
    EMPTY,
    BufferLayout,
    BufferShapes,
    Schedule,
    StepKind,
    check_layout,
)
from barnraise.core.errors import ConfigError, UnsupportedOperation

__all__ = [
    "STRATEGIES",
    "STRATEGY_NAMES",
    "compile_program",
    "named",
    "read_name",
    "resolve_strategy",
    "strategies_for",
]

Compiler = Callable[[int, int, BufferLayout], Schedule]

# The order is the preference between equals.
STRATEGIES: Mapping[StepKind, Mapping[str, Compiler]] = MappingProxyType(
    {
        StepKind.ALL_REDUCE: {
            "ring": ring.all_reduce,
            "doubling": recursive_doubling.all_reduce,
            "exchange": recursive_doubling.exchange,
            "direct": direct.all_reduce,
            "tree": tree.all_reduce,
            "star": star.all_reduce,
            "sites": hierarchical.all_reduce,
        },
        StepKind.REDUCE: {"ring": ring.reduce, "tree": tree.reduce, "star": star.reduce},
        StepKind.BROADCAST: {"ring": ring.broadcast, "tree": tree.broadcast, "star": star.broadcast},
        StepKind.ALL_GATHER: {
            "ring": ring.all_gather,
            "doubling": recursive_doubling.all_gather,
            "direct": direct.all_gather,
        },
        StepKind.REDUCE_SCATTER: {
            "ring": ring.reduce_scatter,
            "doubling": recursive_doubling.reduce_scatter,
            "direct": direct.reduce_scatter,
        },
        StepKind.ALL_TO_ALL: {"direct": direct.all_to_all},
        StepKind.GATHER: {"star": star.gather},
        StepKind.SCATTER: {"star": star.scatter},
        StepKind.BARRIER: {"doubling": recursive_doubling.barrier},
    }
)

STRATEGY_NAMES: tuple[str, ...] = ("ring", "tree", "doubling", "exchange", "star", "direct", "sites")

_ONE_SIZE = frozenset({StepKind.ALL_REDUCE, StepKind.REDUCE, StepKind.BROADCAST})


def strategies_for(kind: str) -> tuple[str, ...]:
    """The strategies that exist for an operation, preferred first."""
    return tuple(STRATEGIES[_kind(kind)])


def resolve_strategy(kind: str, name: str) -> str:
    """The strategy's own name (``centralised`` is the star), or an error that lists the valid ones."""
    wanted = "star" if name == "centralised" else name
    if wanted not in STRATEGY_NAMES:
        raise ConfigError(
            f"there is no strategy {name!r}", hint=f"Use auto, plain or one of: {', '.join(STRATEGY_NAMES)}."
        )
    valid = strategies_for(kind)
    if wanted not in valid and wanted == "direct" and "star" in valid:
        # To and from one root, speaking to every rank directly is the star.
        return "star"
    if wanted not in valid:
        raise UnsupportedOperation(
            f"{kind} has no strategy {name!r}", hint=f"Use auto, plain or one of: {', '.join(valid)}."
        )
    return wanted


def named(strategy: str, shapes: BufferShapes) -> str:
    """``sites``, or with shapes of its own ``sites:tree/ring/star``: ranks compare it as one word."""
    return strategy if strategy != "sites" or shapes == CHAINS else f"{strategy}:{'/'.join(shapes)}"


def read_name(name: str) -> tuple[str, BufferShapes]:
    """A strategy and its shapes, which are checked when it is compiled."""
    strategy, _, shapes = name.partition(":")
    return strategy, BufferShapes(*shapes.split("/")) if shapes.count("/") == 2 else CHAINS


@lru_cache(maxsize=256)
def compile_program(kind: str, strategy: str, rank: int, world: int, layout: BufferLayout) -> Schedule:
    """This rank's program. Every rank of the group must ask with equal arguments but its own rank.

    (For all_to_all each rank gives its own splits.)
    """
    operation = _kind(kind)
    check_layout(rank, world, layout)
    expected = 1 if operation in _ONE_SIZE else 0 if operation is StepKind.BARRIER else world
    if operation is StepKind.ALL_TO_ALL:
        expected = 2 * world
    if len(layout.sizes) != expected:
        raise ConfigError(
            f"{operation} on {world} ranks needs {expected} sizes, not {len(layout.sizes)}",
            hint="Give one size per rank, or the whole size where all ranks have the same buffer.",
        )
    compiler = STRATEGIES[operation][resolve_strategy(operation, strategy)]
    return EMPTY if world == 1 else compiler(rank, world, layout)


def _kind(kind: str) -> StepKind:
    try:
        return StepKind(kind)
    except ValueError:
        names = ", ".join(StepKind)
        raise UnsupportedOperation(f"there is no operation {kind!r}", hint=f"Use one of: {names}.") from None
