"""From an operation's specification to its program. Pure and torch-free."""

from __future__ import annotations

from functools import lru_cache

from barnraise.collectives.algorithms import compile_program, read_name
from barnraise.collectives.algorithms.schedule import BufferLayout, IndexedSchedule, indexed
from barnraise.collectives.messages import OperationSpec
from barnraise.collectives.ops.dtypes import by_code


@lru_cache(maxsize=512)
def compile_operation(
    specification: OperationSpec,
    rank: int,
    world: int,
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> IndexedSchedule:
    """``splits``: this rank's send and receive sizes, for all_to_all only."""
    sizes = specification.sizes if splits is None else splits[0] + splits[1]
    strategy, shapes = read_name(specification.strategy)
    goes_around = strategy == "ring"
    layout = BufferLayout(
        sizes=sizes,
        item=by_code(specification.dtype).size,
        root=max(0, specification.root),
        segment=specification.segment,
        arity=specification.arity,
        order=tuple(rank for site in specification.sites for rank in site) if goes_around else (),
        sites=() if goes_around else specification.sites,
        shapes=shapes,
    )
    return indexed(compile_program(specification.kind, strategy, rank, world, layout))
