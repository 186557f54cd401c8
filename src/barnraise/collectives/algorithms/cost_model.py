"""Cost model of one collective: predicts each algorithm's time, and chooses one. Pure arithmetic.

Each host has one full-duplex port that all its peers share. It has one communication process that moves,
encrypts and adds. Work on segments overlaps with the wire.

Only +, -, *, / and comparisons are used, so every machine computes the same values to the last bit. From
one agreed table all ranks choose the same algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Annotated

import msgspec

from barnraise.collectives.algorithms.compile import algorithms_for, resolve_algorithm
from barnraise.collectives.algorithms.schedule import (
    CHAINS,
    DEFAULT_SEGMENT_BYTES,
    OperationKind,
    StageShapes,
)
from barnraise.collectives.algorithms.tree import depth
from barnraise.core.errors import ConfigError, UnsupportedOperation
from barnraise.core.units import format_duration, format_size

PLAIN_BELOW_BYTES = 1 << 20
PLAIN_BELOW_RANKS = 4
SMALLEST_SEGMENT_BYTES = 16 << 10
# A segment's time on the wire should be well above the work of one more message.
WIRE_TIME_PER_MESSAGE = 8
# Enough segments that work overlaps with the wire; in a tree, that the last rank is hardly later.
SEGMENTS_PER_STEP = 8
SEGMENTS_PER_TREE = 64
# Predictions closer than this factor count as equal: then the order of preference decides.
TIE = 1.01
# Links inside a site are at least this much faster than links between sites.
SITE_STEP = 4
# Several senders to one port are slightly slower than a ring, where each port has one sender.
CROWDING = 1.03

_Cost = Annotated[float, msgspec.Meta(ge=0, le=1000)]


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a group's links and machines. Every rank of a group must hold the same table."""

    latency_s: _Cost = 150e-6
    """Seconds from passing a small message to the link until the peer has applied it, software included."""
    seconds_per_byte: _Cost = 8.5e-9
    """One direction of the slowest port."""
    reduce_seconds_per_byte: _Cost = 0.25e-9
    """Adding a received byte."""
    copy_seconds_per_byte: _Cost = 1.2e-9
    """Work of the communication process to send or receive a byte: encryption and copies."""
    message_s: _Cost = 60e-6
    """Work of the communication process for one more message, sent or received."""

    def __post_init__(self) -> None:
        if not all(isfinite(value) and value >= 0 for value in msgspec.structs.astuple(self)):
            raise ValueError("a cost is not a finite number of seconds")

    @classmethod
    def default(cls) -> CostTable:
        """Return the costs of a quiet wired network of 1 Gbit/s."""
        return cls()

    @classmethod
    def measured(cls, latency_s: float, seconds_per_byte: float) -> CostTable:
        """Return a table from link probes. The costs of the machine itself are the default ones."""
        return cls(latency_s=latency_s, seconds_per_byte=seconds_per_byte)


def merge_tables(tables: Iterable[CostTable]) -> CostTable:
    """Return the largest value of each cost, because all ranks wait for the slowest."""
    rows = [msgspec.structs.astuple(table) for table in tables]
    if not rows:
        return CostTable.default()
    worst = (max(column) for column in zip(*rows, strict=True))
    return CostTable(**dict(zip(CostTable.__struct_fields__, worst, strict=True)))


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """The chosen algorithm and the reason, as a sentence with numbers."""

    algorithm: str
    segment: int
    arity: int
    seconds: float
    reason: str


def segment_bytes(
    kind: str, algorithm: str, nbytes: int, world: int, table: CostTable, limit: int = DEFAULT_SEGMENT_BYTES
) -> int:
    """Return the segment size of an operation, at most ``limit``.

    Segments are small enough that work and wire overlap, and large enough that messages cost little. If
    ranks may see different sizes, the size is the limit: both ends of a link must cut the same segments.
    """
    if kind in (OperationKind.ALL_TO_ALL, OperationKind.GATHER, OperationKind.SCATTER, OperationKind.BARRIER):
        return limit
    if algorithm in ("tree", "star", "sites") or kind in (OperationKind.REDUCE, OperationKind.BROADCAST):
        wanted = nbytes // SEGMENTS_PER_TREE
    else:
        wanted = (nbytes if algorithm == "exchange" else nbytes // world) // SEGMENTS_PER_STEP
    worthwhile = limit
    if table.seconds_per_byte > 0:
        worthwhile = int(min(limit, WIRE_TIME_PER_MESSAGE * table.message_s / table.seconds_per_byte))
    return min(limit, max(SMALLEST_SEGMENT_BYTES, worthwhile, wanted) // 64 * 64)


def predict(
    kind: str,
    algorithm: str,
    nbytes: int,
    world: int,
    table: CostTable,
    arity: int = 2,
    segment: int | None = None,
    leaders: int = 0,
    shapes: StageShapes = CHAINS,
) -> float:
    """Predict the seconds until the last rank has its result.

    ``nbytes``: the tensor of all_reduce, reduce and broadcast, and otherwise all blocks together.
    ``leaders``: number of sites. ``shapes``: how sums go through the sites.
    """
    name = resolve_algorithm(kind, algorithm)
    if world == 1:
        return 0.0
    operation = OperationKind(kind)
    if operation is OperationKind.BARRIER:
        return _barrier(name, world, leaders or world) * table.latency_s
    cut = segment or segment_bytes(kind, name, nbytes, world, table)
    shape = _Shape(operation, nbytes, world, arity, cut, table, leaders, shapes)
    return _PREDICTORS[name](shape)


@lru_cache(maxsize=4096)
def choose(
    kind: str,
    nbytes: int,
    world: int,
    table: CostTable,
    setting: str = "auto",
    *,
    arity: int = 2,
    limit: int = DEFAULT_SEGMENT_BYTES,
    plain_below: int = PLAIN_BELOW_BYTES,
    strict: bool = False,
    leaders: int = 0,
    shapes: StageShapes = CHAINS,
) -> AlgorithmChoice:
    """Choose the algorithm of an operation.

    ``setting``: ``auto`` (fastest by the table), ``plain``, or a name.

    One setting serves all operations. A name that this operation does not have falls back to ``auto``, or
    raises an error if ``strict``. An unknown name always raises an error.
    """
    if arity < 2:
        raise ConfigError(f"a tree of arity {arity} never branches", hint="Use arity 2 or more.")
    leaders = leaders or (world if setting == "sites" else 0)
    ranked = _ranked(kind, nbytes, world, table, arity, limit, leaders, shapes)
    times = {name: seconds for seconds, name in ranked}
    best = ranked[0][1]
    size = f"{format_size(nbytes)} on {world} ranks"
    if setting == "plain":
        chosen = _plain(kind, nbytes, world, plain_below)
        reason = (
            f"{chosen}: plain rule, tree below {format_size(plain_below)} or {PLAIN_BELOW_RANKS} ranks "
            f"and ring above where they exist; {size}, about {format_duration(times[chosen])}."
        )
    elif setting != "auto" and (forced := _forced(kind, setting, strict)) is not None:
        chosen = forced
        reason = f"{chosen}: set by name; {size}, about {format_duration(times[chosen])}."
        if chosen != best:
            reason += f" {best} would take about {format_duration(times[best])}."
    else:
        chosen = best
        reason = _auto_reason(ranked, world, size)
        if setting != "auto":
            reason += f" {setting}, which is set, does not exist for {kind}."
    segment = segment_bytes(kind, chosen, nbytes, world, table, limit)
    return AlgorithmChoice(chosen, segment, arity, times[chosen], reason)


def _ranked(
    kind: str,
    nbytes: int,
    world: int,
    table: CostTable,
    arity: int,
    limit: int,
    leaders: int,
    shapes: StageShapes,
) -> list[tuple[float, str]]:
    """Return every algorithm with its time: the one to choose first, the others in order of time."""
    timed = []
    for name in algorithms_for(kind):
        if name != "sites" or leaders:
            segment = segment_bytes(kind, name, nbytes, world, table, limit)
            timed.append((predict(kind, name, nbytes, world, table, arity, segment, leaders, shapes), name))
    fastest = min(seconds for seconds, _ in timed)
    chosen = next(entry for entry in timed if entry[0] <= fastest * TIE)
    return [chosen, *sorted(entry for entry in timed if entry != chosen)]


def _auto_reason(ranked: list[tuple[float, str]], world: int, size: str) -> str:
    seconds, best = ranked[0]
    if world == 1:
        return f"{best}: a single rank has nothing to send."
    if len(ranked) == 1:
        return f"{best}: the only algorithm; {size}, about {format_duration(seconds)}."
    next_seconds, following = ranked[1]
    rival = f"{following} with {format_duration(next_seconds)}"
    if next_seconds < seconds:
        return f"{best}: {size}, about {format_duration(seconds)}; {rival} is not clearly faster."
    return f"{best}: fastest for {size}, about {format_duration(seconds)}; next is {rival}."


def _plain(kind: str, nbytes: int, world: int, below: int) -> str:
    valid = algorithms_for(kind)
    wanted = "tree" if nbytes < below or world < PLAIN_BELOW_RANKS else "ring"
    return next((name for name in (wanted, "ring") if name in valid), valid[0])


def _forced(kind: str, setting: str, strict: bool) -> str | None:
    try:
        return resolve_algorithm(kind, setting)
    except UnsupportedOperation:
        if strict:
            raise
        return None


class _Shape:
    """One operation in the terms that all predictions share."""

    def __init__(
        self,
        kind: OperationKind,
        nbytes: int,
        world: int,
        arity: int,
        segment: int,
        table: CostTable,
        leaders: int = 0,
        shapes: StageShapes = CHAINS,
    ) -> None:
        self.shapes = shapes
        self.nbytes = nbytes
        self.world = world
        self.leaders = leaders
        self.arity = arity
        self.segment = segment
        self.table = table
        self.phases = 2 if kind is OperationKind.ALL_REDUCE else 1
        self.reduces = kind in (OperationKind.ALL_REDUCE, OperationKind.REDUCE, OperationKind.REDUCE_SCATTER)
        self.along_root = kind in (OperationKind.REDUCE, OperationKind.BROADCAST)
        self.in_blocks = kind in (OperationKind.GATHER, OperationKind.SCATTER)

    def segment_count(self, nbytes: float) -> int:
        return max(1, -(-int(nbytes) // self.segment))

    def work(self, moved: float, added: float, messages: float) -> float:
        """Return the busy seconds of the communication process.

        ``messages``: the messages whose work is not part of the latency.
        """
        table = self.table
        adding = added * table.reduce_seconds_per_byte if self.reduces else 0.0
        return moved * table.copy_seconds_per_byte + adding + max(0.0, messages) * table.message_s

    def steps(self, count: int, each: float, added: float) -> float:
        """Return the time of ``count`` steps that each send and receive ``each`` bytes.

        Every step forwards the bytes that the step before received.
        """
        segments = self.segment_count(each)
        wire = each * self.table.seconds_per_byte
        work = self.work(2 * each, added, 2 * (segments - 1))
        # The next step starts with this step's first segment, once port and process are free.
        turn = max(wire, work, self.table.latency_s + (wire + work) / segments)
        return (count - 1) * turn + max(wire, work) + min(wire, work) / segments + self.table.latency_s

    def flow(self, *, hops: int, port: float, added: float, messages: float, segments: int) -> float:
        """Return the time of ``hops`` messages in a row, with ``port`` bytes each way on the busiest port."""
        wire = port * self.table.seconds_per_byte
        work = self.work(2 * port, added, messages - 2 * hops)
        return hops * self.table.latency_s + max(wire, work) + min(wire, work) / segments


def _ring(shape: _Shape) -> float:
    if shape.along_root:
        return _levels(shape, fan=1, levels=shape.world - 1)
    chunk = shape.nbytes / shape.world
    return shape.steps(shape.phases * (shape.world - 1), chunk, chunk / shape.phases)


def _doubling(shape: _Shape) -> float:
    share = shape.nbytes * (shape.world - 1) / shape.world
    hops = shape.phases * _log2_ceil(shape.world)
    port = shape.phases * share
    segments = shape.segment_count(share)
    return shape.flow(
        hops=hops, port=port, added=share, messages=2 * (hops + port / shape.segment), segments=segments
    )


def _exchange(shape: _Shape) -> float:
    rounds = shape.world.bit_length() - 1
    if shape.world == 1 << rounds:
        return shape.steps(rounds, shape.nbytes, shape.nbytes)
    # Folding in and out; with several segments one of the two overlaps with the rounds.
    folds = 2 if shape.segment_count(shape.nbytes) == 1 else 1
    return shape.steps(rounds + folds, shape.nbytes, shape.nbytes) + (2 - folds) * shape.table.latency_s


def _direct(shape: _Shape) -> float:
    chunk = shape.nbytes / shape.world
    others = shape.world - 1
    crowding = CROWDING if others > 1 else 1.0
    port = shape.phases * chunk * others * crowding
    segments = shape.segment_count(chunk)
    messages = 2 * shape.phases * others * segments
    return shape.flow(
        hops=shape.phases, port=port, added=chunk * others, messages=messages, segments=segments * others
    )


def _tree(shape: _Shape) -> float:
    fan = min(shape.arity, shape.world - 1)
    return _levels(shape, fan=fan, levels=depth(shape.world, shape.arity))


def _star(shape: _Shape) -> float:
    others = shape.world - 1
    if shape.in_blocks:
        block = shape.nbytes / shape.world
        segments = shape.segment_count(block) * others
        return shape.flow(hops=1, port=block * others, added=0, messages=segments, segments=segments)
    return _levels(shape, fan=others, levels=1)


def _levels(shape: _Shape, *, fan: int, levels: int) -> float:
    """Return the time of a tree: the first segment passes level by level, the others follow.

    The busiest rank limits the rate of the following segments.
    """
    table = shape.table
    segments = shape.segment_count(shape.nbytes)
    segment_size = shape.nbytes / segments
    inner = levels > 1
    each_way = fan + 1 if inner and shape.phases == 2 else fan
    handled = shape.phases * (fan + 1 if inner else fan)
    pace = max(
        each_way * segment_size * table.seconds_per_byte,
        shape.work(handled * segment_size, fan * segment_size, handled),
    )
    # At one level every child counts; at the others the slowest path passes through a middle child.
    children = fan + (levels - 1) * (fan + 1) / 2
    passing = children * segment_size * table.seconds_per_byte + shape.work(
        (children + levels) * segment_size, children * segment_size / shape.phases, children - levels
    )
    return shape.phases * (levels * table.latency_s + passing) + (segments - 1) * pace


def _barrier(name: str, world: int, leaders: int) -> float:
    """Return the number of latencies of a barrier. Each member of a site sends and receives one message."""
    if name != "sites":
        return _log2_ceil(world)
    return _log2_ceil(leaders) + (2 / SITE_STEP if world > leaders else 0)


def _sites(shape: _Shape) -> float:
    """Return the time of the leaders, plus the first and last segment's way through a site."""
    leaders = shape.leaders or shape.world
    size = -(-shape.world // leaders)
    stages: tuple[str, ...] = (shape.shapes.reduce, shape.shapes.broadcast)
    if shape.along_root:
        stages = stages[:1] if shape.reduces else stages[1:]
    hops = sum(_hops(stage, size, shape.arity) for stage in stages)
    segment_size = shape.nbytes / shape.segment_count(shape.nbytes)
    hop = (shape.table.latency_s + segment_size * shape.table.seconds_per_byte) / SITE_STEP
    across = shape.shapes.across
    if across == "ring" and not shape.along_root:
        chunk = shape.nbytes / leaders
        return shape.steps(2 * (leaders - 1), chunk, chunk / 2) + hops * hop
    levels = _hops(across, leaders, shape.arity)
    fan = {"ring": 1, "star": leaders - 1, "tree": min(shape.arity, leaders - 1)}[across]
    return _levels(shape, fan=fan, levels=levels) + hops * hop


def _hops(shape: str, ranks: int, arity: int) -> int:
    """Return the number of hops from the furthest rank to the first one."""
    return {"ring": ranks - 1, "tree": depth(ranks, arity), "star": min(1, ranks - 1)}[shape]


def _log2_ceil(world: int) -> int:
    return (world - 1).bit_length()


_PREDICTORS: dict[str, Callable[[_Shape], float]] = {
    "ring": _ring,
    "doubling": _doubling,
    "exchange": _exchange,
    "direct": _direct,
    "tree": _tree,
    "star": _star,
    "sites": _sites,
}
