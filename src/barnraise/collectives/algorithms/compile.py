"""Algorithm registry and compiler: an operation's specification in, one rank's ``Schedule`` out.

Pure and torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from barnraise.collectives.algorithms import direct, hierarchical, recursive_doubling, ring, star, tree
from barnraise.collectives.algorithms.schedule import (
    CHAINS,
    EMPTY,
    BufferLayout,
    IndexedSchedule,
    OperationKind,
    Schedule,
    StageShapes,
    check_layout,
    indexed,
)
from barnraise.collectives.ops.dtypes import by_code
from barnraise.core.config import strategy_name
from barnraise.core.errors import ConfigError, UnsupportedOperation

if TYPE_CHECKING:  # its module imports the cost model, which imports this one
    from barnraise.collectives.messages import OperationSpec

Compiler = Callable[[int, int, BufferLayout], Schedule]

# The order decides between equal predictions.
ALGORITHMS: Mapping[OperationKind, Mapping[str, Compiler]] = MappingProxyType(
    {
        OperationKind.ALL_REDUCE: {
            "ring": ring.all_reduce,
            "doubling": recursive_doubling.all_reduce,
            "exchange": recursive_doubling.exchange,
            "direct": direct.all_reduce,
            "tree": tree.all_reduce,
            "star": star.all_reduce,
            "sites": hierarchical.all_reduce,
        },
        OperationKind.REDUCE: {
            "ring": ring.reduce,
            "tree": tree.reduce,
            "star": star.reduce,
            "sites": hierarchical.reduce,
        },
        OperationKind.BROADCAST: {
            "ring": ring.broadcast,
            "tree": tree.broadcast,
            "star": star.broadcast,
            "sites": hierarchical.broadcast,
        },
        OperationKind.ALL_GATHER: {
            "ring": ring.all_gather,
            "doubling": recursive_doubling.all_gather,
            "direct": direct.all_gather,
        },
        OperationKind.REDUCE_SCATTER: {
            "ring": ring.reduce_scatter,
            "doubling": recursive_doubling.reduce_scatter,
            "direct": direct.reduce_scatter,
        },
        OperationKind.ALL_TO_ALL: {"direct": direct.all_to_all},
        OperationKind.GATHER: {"star": star.gather},
        OperationKind.SCATTER: {"star": star.scatter},
        OperationKind.BARRIER: {"doubling": recursive_doubling.barrier, "sites": hierarchical.barrier},
    }
)

ALGORITHM_NAMES: tuple[str, ...] = ("ring", "tree", "doubling", "exchange", "star", "direct", "sites")

_ONE_SIZE = frozenset({OperationKind.ALL_REDUCE, OperationKind.REDUCE, OperationKind.BROADCAST})


def algorithms_for(kind: str) -> tuple[str, ...]:
    """Return the algorithms of an operation, in order of preference."""
    return tuple(ALGORITHMS[_kind(kind)])


def resolve_algorithm(kind: str, name: str) -> str:
    """Return the algorithm's own name; the star has other ones.

    Raise an error that lists the valid names.
    """
    wanted = strategy_name(name)
    if wanted not in ALGORITHM_NAMES:
        raise ConfigError(
            f"unknown algorithm {name!r}", hint=f"Use auto, plain or one of: {', '.join(ALGORITHM_NAMES)}."
        )
    valid = algorithms_for(kind)
    if wanted not in valid and wanted == "direct" and "star" in valid:
        # With one root, messages to every rank directly are the star.
        return "star"
    if wanted not in valid:
        raise UnsupportedOperation(
            f"{kind} has no algorithm {name!r}", hint=f"Use auto, plain or one of: {', '.join(valid)}."
        )
    return wanted


def format_label(algorithm: str, shapes: StageShapes) -> str:
    """Return the label of an algorithm that ranks compare: ``sites`` or ``sites:tree/ring/star``."""
    return algorithm if algorithm != "sites" or shapes == CHAINS else f"{algorithm}:{'/'.join(shapes)}"


def parse_label(name: str) -> tuple[str, StageShapes]:
    """Return an algorithm and its stage shapes. The shapes are checked when the schedule is compiled."""
    algorithm, _, shapes = name.partition(":")
    return algorithm, StageShapes(*shapes.split("/")) if shapes.count("/") == 2 else CHAINS


@lru_cache(maxsize=256)
def compile_schedule(kind: str, algorithm: str, rank: int, world: int, layout: BufferLayout) -> Schedule:
    """Compile this rank's schedule.

    Every rank of the group must call this with equal arguments except its own rank. For all_to_all each
    rank passes its own splits.
    """
    operation = _kind(kind)
    check_layout(rank, world, layout)
    expected = 1 if operation in _ONE_SIZE else 0 if operation is OperationKind.BARRIER else world
    if operation is OperationKind.ALL_TO_ALL:
        expected = 2 * world
    if len(layout.sizes) != expected:
        raise ConfigError(
            f"{operation} on {world} ranks needs {expected} sizes, not {len(layout.sizes)}",
            hint="Give one size per rank, or the whole size where all ranks have the same buffer.",
        )
    compiler = ALGORITHMS[operation][resolve_algorithm(operation, algorithm)]
    return EMPTY if world == 1 else compiler(rank, world, layout)


@lru_cache(maxsize=512)
def compile_operation(
    specification: OperationSpec,
    rank: int,
    world: int,
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> IndexedSchedule:
    """Compile the schedule of a specification.

    ``splits``: this rank's send and receive sizes, for all_to_all only.
    """
    sizes = specification.sizes if splits is None else splits[0] + splits[1]
    algorithm, shapes = parse_label(specification.algorithm)
    is_ring = algorithm == "ring"
    layout = BufferLayout(
        sizes=sizes,
        item=by_code(specification.dtype).size,
        root=max(0, specification.root),
        segment=specification.segment,
        arity=specification.arity,
        order=tuple(rank for site in specification.sites for rank in site) if is_ring else (),
        sites=() if is_ring else specification.sites,
        shapes=shapes,
    )
    return indexed(compile_schedule(specification.kind, algorithm, rank, world, layout))


def _kind(kind: str) -> OperationKind:
    try:
        return OperationKind(kind)
    except ValueError:
        names = ", ".join(OperationKind)
        raise UnsupportedOperation(f"unknown operation {kind!r}", hint=f"Use one of: {names}.") from None
