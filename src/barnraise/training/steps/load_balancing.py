"""Load balancing: which micro-batches of a step each worker computes, by measured speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from barnraise.core.errors import ProtocolError
from barnraise.runs.sharding import MicroBatch, assign_micro_batches
from barnraise.training.group.interface import GroupManager
from barnraise.training.steps.throughput import Throughput

log = logging.getLogger("barnraise.training")

Assignment = tuple[tuple[int, ...], ...]  # numbers of micro-batches by rank
Assigner = Callable[
    [Sequence[MicroBatch], Mapping[int, frozenset[int]], Sequence[float], frozenset[int]], Assignment
]


def assign_own(
    units: Sequence[MicroBatch],
    completed: Mapping[int, frozenset[int]],
    throughput: Throughput,
    manager: GroupManager,
) -> list[MicroBatch]:
    """Return this rank's micro-batches of those that are not ``completed``. Log which machines get none."""
    world, own_rank = manager.world, manager.rank
    speeds = speeds_of(throughput, world)
    assignment, idle = assign_all(units, completed, throughput, world)
    for rank in idle:
        if own_rank in (0, rank):
            log.warning(
                "%s is too slow to wait for (%.0f samples/s, all together %.0f); the others do its work, and "
                "it is tried again later",
                manager.name_of(rank),
                speeds[rank],
                sum(speeds),
            )
    return [units[number] for number in assignment[own_rank]]


def assign_all(
    units: Sequence[MicroBatch],
    completed: Mapping[int, frozenset[int]],
    throughput: Throughput,
    world: int,
    assigner: Assigner = assign_micro_batches,
) -> tuple[Assignment, list[int]]:
    """Return the micro-batches of every rank, and the ranks that have none for the first time.

    The result is the same on all workers.
    """
    if any(not 0 <= number < len(units) for numbers in completed.values() for number in numbers):
        raise ProtocolError("a worker has completed micro-batches that the step does not have")
    assignment = assigner(units, completed, speeds_of(throughput, world), throughput.ranks_to_retry(world))
    counts = [len(assignment[rank]) + len(completed.get(rank, ())) for rank in range(world)]
    throughput.assigned = tuple(counts)
    return assignment, throughput.note_assignment(counts) if len(units) >= world else []


def speeds_of(throughput: Throughput, world: int) -> Sequence[float]:
    """Return the speed of every rank; equal speeds while they are unknown."""
    return throughput.speeds if len(throughput.speeds) == world else [1.0] * world
