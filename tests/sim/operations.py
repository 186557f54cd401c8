"""Random operations: the memory of each rank before, and after as computed with numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np

from barnraise.collectives.algorithms.compile import ALGORITHMS
from barnraise.collectives.algorithms.schedule import OperationKind, block_bounds
from barnraise.collectives.messages import OperationSpec
from barnraise.collectives.ops.dtypes import by_code, numpy_dtype

REDUCING = (OperationKind.ALL_REDUCE, OperationKind.REDUCE, OperationKind.REDUCE_SCATTER)
ROOTED = (OperationKind.REDUCE, OperationKind.BROADCAST, OperationKind.GATHER, OperationKind.SCATTER)
DTYPES = (6, 8, 1)  # uint8, int32, float32; every sum below is exact in any order
Region = tuple[int, bytes]


@dataclass(frozen=True)
class Collective:
    """One operation of a group: per rank its memory before, and the regions that matter after."""

    specification: OperationSpec
    before: tuple[bytes, ...]
    after: tuple[tuple[Region, ...], ...]
    splits: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None = None


@dataclass(frozen=True)
class Message:
    """A point-to-point message; ``any_source`` says how it is received."""

    source: int
    destination: int
    tag: int
    dtype: int
    data: bytes
    any_source: bool = False


def collective(random: Random, world: int) -> Collective:
    kind = random.choice(list(OperationKind))
    algorithm = random.choice(list(ALGORITHMS[kind]))
    dtype = random.choice(DTYPES)
    item = by_code(dtype).size
    root = random.randrange(world)
    if kind is OperationKind.ALL_TO_ALL:
        return _all_to_all(random, world, dtype, item)
    if kind is OperationKind.BARRIER:
        sizes: tuple[int, ...] = ()
    elif kind in (OperationKind.ALL_REDUCE, OperationKind.REDUCE, OperationKind.BROADCAST):
        sizes = (_size(random, item),)
    else:
        sizes = tuple(_size(random, item, world) for _ in range(world))
    reduction = random.choice(("sum", "max")) if kind in REDUCING else ""
    specification = OperationSpec(
        kind.value,
        dtype,
        reduction,
        root if kind in ROOTED else -1,
        algorithm,
        sizes,
        _segment(random, sum(sizes), item),
        random.choice((2, 3)),
    )
    bounds = block_bounds(sizes)
    lengths = [sum(sizes)] * world
    if kind in (OperationKind.GATHER, OperationKind.SCATTER):
        lengths = [sum(sizes) if rank == root else sizes[rank] for rank in range(world)]
    before = tuple(_values(random, dtype, length) for length in lengths)
    after = tuple(_after(kind, reduction, dtype, root, rank, bounds, before) for rank in range(world))
    return Collective(specification, before, after)


def _after(
    kind: OperationKind,
    reduction: str,
    dtype: int,
    root: int,
    rank: int,
    bounds: tuple[int, ...],
    before: tuple[bytes, ...],
) -> tuple[Region, ...]:
    if kind in REDUCING:
        arrays = [np.frombuffer(data, numpy_dtype(dtype)) for data in before]
        total = arrays[0].copy()
        for array in arrays[1:]:
            total = np.add(total, array) if reduction == "sum" else np.maximum(total, array)
        whole = total.tobytes()
        if kind is OperationKind.ALL_REDUCE:
            return ((0, whole),)
        if kind is OperationKind.REDUCE:
            return ((0, whole),) if rank == root else ()
        return ((bounds[rank], whole[bounds[rank] : bounds[rank + 1]]),)
    if kind is OperationKind.BROADCAST:
        return ((0, before[root]),)
    if kind is OperationKind.ALL_GATHER:
        return tuple((bounds[a], before[a][bounds[a] : bounds[a + 1]]) for a in range(len(before)))
    if kind is OperationKind.GATHER and rank == root:
        own = (bounds[root], before[root][bounds[root] : bounds[root + 1]])
        return (own, *((bounds[a], before[a]) for a in range(len(before)) if a != root))
    if kind is OperationKind.SCATTER and rank != root:
        return ((0, before[root][bounds[rank] : bounds[rank + 1]]),)
    return ()


def _all_to_all(random: Random, world: int, dtype: int, item: int) -> Collective:
    table = [tuple(_size(random, item, world) for _ in range(world)) for _ in range(world)]
    columns = [tuple(table[a][b] for a in range(world)) for b in range(world)]
    segment = random.choice((item * 256, 20_000, 1 << 18))
    specification = OperationSpec("all_to_all", dtype, "", -1, "direct", (), segment, 2)
    inputs = [_values(random, dtype, sum(row)) for row in table]
    before = tuple(inputs[rank] + bytes(sum(columns[rank])) for rank in range(world))
    after = []
    for rank in range(world):
        start, regions = len(inputs[rank]), []
        for a in range(world):
            if a != rank:
                lo = sum(table[a][:rank])
                regions.append((start, inputs[a][lo : lo + table[a][rank]]))
            start += table[a][rank]
        after.append(tuple(regions))
    splits = tuple((table[rank], columns[rank]) for rank in range(world))
    return Collective(specification, before, tuple(after), splits)


@dataclass
class Tags:
    """Source of tags; some repeat, because messages under one tag keep their order."""

    random: Random
    fresh: int = 100
    shared: tuple[int, ...] = field(default=(0, 7, 0xFFFFFFFF))

    def take(self, *, alone: bool) -> int:
        if not alone:
            return self.random.choice(self.shared)
        self.fresh += 1
        return self.fresh


def message(random: Random, world: int, tags: Tags) -> Message:
    source, destination = random.sample(range(world), 2)
    dtype = random.choice(DTYPES)
    any_source = random.random() < 0.2
    data = _values(random, dtype, _size(random, by_code(dtype).size))
    return Message(source, destination, tags.take(alone=any_source), dtype, data, any_source)


def _size(random: Random, item: int, parts: int = 1) -> int:
    """Return a size: mostly small, sometimes zero, sometimes too large to be sent ahead."""
    draw = random.random()
    if draw < 0.1:
        return 0
    if draw < 0.8:
        return item * random.randrange(1, 100)
    return item * (random.randrange(16_000, 40_000) // item // parts)


def _segment(random: Random, nbytes: int, item: int) -> int:
    """Return a segment size that gives few enough messages for a short run."""
    min_bytes = max(item, nbytes // 24)
    return min(1 << 20, max(min_bytes, random.choice((16, 64, 1024, 20_000, 1 << 18))))


def _values(random: Random, dtype: int, nbytes: int) -> bytes:
    generator = np.random.default_rng(random.getrandbits(32))
    kind = numpy_dtype(dtype)
    return generator.integers(1, 50, nbytes // kind.itemsize).astype(kind).tobytes()
