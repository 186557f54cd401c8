"""Single sums against the lab: the sweep over strategies (docs/benchmarks/collectives.md), simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from barnraise.collectives.algorithms.cost_model import segment_bytes
from barnraise.collectives.algorithms.schedule import MAX_SEGMENT_BYTES, BufferLayout, OperationKind
from barnraise.core.units import parse_rate
from benchmarks.simulation.networks import lab_world
from benchmarks.simulation.operations import Operation, compiled

_FLOAT = 4
HOSTS = 4
SMALLEST = 1 << 20  # below, what counts is how fast processes wake up


class Sum(NamedTuple):
    """An all-reduce of four hosts by one strategy. ``is_auto``: the one that is taken."""

    mbps: float
    delay_ms: float
    size: int
    strategy: str
    is_auto: bool
    simulated_s: float
    measured_s: float

    @property
    def off(self) -> float:
        return abs(self.simulated_s / self.measured_s - 1)


def swept(points: Path) -> Iterator[Sum]:
    """Yield the measured points of four hosts whose lines, and not the two cores, set the time."""
    for point in json.loads(points.read_text())["points"]:
        mbps, delay_ms = parse_rate(point["rate"]) / 1e6, float(point["delay"].removesuffix("ms"))
        if point["hosts"] != HOSTS or point["size"] < SMALLEST or mbps > 100:
            continue
        for strategy, used in point["used"].items():
            if strategy == used:
                simulated = all_reduce_s(mbps, delay_ms, point["size"], strategy)
                is_auto = point["used"]["auto"] == strategy
                measured = point["seconds"][strategy]
                yield Sum(mbps, delay_ms, point["size"], strategy, is_auto, simulated, measured)


def all_reduce_s(mbps: float, delay_ms: float, size: int, strategy: str) -> float:
    world = lab_world(HOSTS, mbps, delay_ms, 1.0)
    segment = segment_bytes(
        OperationKind.ALL_REDUCE, strategy, size, HOSTS, world.links.table, MAX_SEGMENT_BYTES
    )
    layout = BufferLayout(sizes=(size,), item=_FLOAT, segment=segment)
    ended: list[float] = []
    operation = Operation(
        world.network,
        "sum",
        range(HOSTS),
        compiled(OperationKind.ALL_REDUCE, strategy, HOSTS, layout),
        lambda rank: ended.append(world.clock.now),
    )
    for rank in range(HOSTS):
        operation.begin(rank)
    world.clock.run_until(lambda: len(ended) == HOSTS)
    return max(ended)
