"""Figures of a split model from what its workers have written. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.report import p95

_SETTLING_STEPS = 2  # of a group, which do not count: the memory of its new blocks is touched first


class Row(NamedTuple):
    """A step that one worker has committed. ``at``: seconds of the clock of the whole lab.

    ``busy_s``: in which this worker computed. ``trained_bytes``: what its stage trains, with the optimizer.
    ``moved_bytes``: of trained state that its process has received so far for its own stage.
    ``mirrored_bytes``: the same as a mirror of others. ``predicted_s``: seconds that the product expects of a
    step; None if it does not say.
    """

    step: int
    generation: int
    world: int
    loss: float
    busy_s: float
    at: float
    trained_bytes: int
    moved_bytes: int
    predicted_s: float | None
    mirrored_bytes: int = 0


class Call(NamedTuple):
    """A call that a worker has timed."""

    name: str
    start: float
    end: float


class Kill(NamedTuple):
    """A death, and when it happened. ``step``: the newest one that was committed before it."""

    kind: str
    host: str
    at: float
    step: int


class Recovery(NamedTuple):
    """Parts of the time from a death to the next commit. Their sum is ``kill_to_commit_s``.

    ``detect_s``: until the first survivor leaves the group. ``regroup_s``: until the first survivor loads
    weights, or has a group if nothing is loaded. ``load_s``: until the last one has loaded. ``step_s``: until
    a survivor commits a step of the new group.
    """

    kill_to_commit_s: float
    detect_s: float
    regroup_s: float
    load_s: float
    step_s: float


class Traffic(NamedTuple):
    """Activations of a micro-batch between two stages, and the rate of the hosts."""

    boundary_bytes: int
    bits_per_s: float


def read_rows(text: str) -> list[Row]:
    """Return the rows of a worker. The last line may be cut off."""
    return [Row(*values) for values in _lines(text)]


def read_calls(text: str) -> list[Call]:
    """Return the calls of a worker. The last line may be cut off."""
    return [Call(*values) for values in _lines(text)]


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("]\n")]


def step_seconds(workers: Sequence[Sequence[Row]]) -> dict[int, float]:
    """Return the seconds of each step, from commit to commit of the last worker, in a group that has settled.

    ``workers``: the rows of each worker.
    """
    last: dict[int, float] = {}
    generation: dict[int, int] = {}
    for row in (row for rows in workers for row in rows):
        last[row.step] = max(row.at, last.get(row.step, 0.0))
        generation[row.step] = max(row.generation, generation.get(row.step, 0))
    result, together = {}, 0
    for step in sorted(last):
        is_same = step - 1 in last and generation[step - 1] == generation[step]
        together = together + 1 if is_same else 0
        if together >= _SETTLING_STEPS:
            result[step] = last[step] - last[step - 1]
    return result


def bound_seconds(workers: Sequence[Sequence[Row]], batches: int, traffic: Traffic) -> dict[int, float]:
    """Return the seconds that the slowest stage or link allows for each step.

    A stage computes all micro-batches one after the other. So its bound is their number times its mean
    seconds for one, which is the time in which it is busy. A link carries the activations of all
    micro-batches one way, and their gradients the other way at the same time.
    """
    link_s = batches * traffic.boundary_bytes * 8 / traffic.bits_per_s
    busy: dict[int, float] = {}
    for row in (row for rows in workers for row in rows):
        busy[row.step] = max(row.busy_s, busy.get(row.step, link_s))
    return busy


def share_of_bound(workers: Sequence[Sequence[Row]], batches: int, traffic: Traffic) -> float:
    """Return the median share of the speed that the slowest stage or link allows."""
    bounds = bound_seconds(workers, batches, traffic)
    return median(bounds[step] / seconds for step, seconds in step_seconds(workers).items())


def prediction_error(workers: Sequence[Sequence[Row]]) -> float | None:
    """Return the difference of the predicted seconds of a step from the median, over that median."""
    known = {row.predicted_s for rows in workers for row in rows if row.predicted_s is not None}
    measured = median(step_seconds(workers).values())
    return max((abs(each / measured - 1) for each in known), default=None)


def loss_gap(workers: Iterable[Sequence[Row]], expected: Mapping[int, float]) -> float:
    """Return the largest difference of a loss from that of the same step alone."""
    return max(abs(row.loss - expected[row.step]) for rows in workers for row in rows)


def samples_lost(workers: Iterable[Sequence[Row]], steps: int, batch: int) -> int:
    """Return the samples of steps that no worker has committed; the equal losses show those of each step."""
    seen = {row.step for rows in workers for row in rows}
    return batch * sum(step not in seen for step in range(1, steps + 1))


def samples_doubled(workers: Sequence[Sequence[Row]], batch: int) -> int:
    """Return the samples of steps that count twice.

    Such a step was committed twice by one machine, or with two results by different ones.
    """
    losses: dict[int, set[float]] = defaultdict(set)
    for row in (row for rows in workers for row in rows):
        losses[row.step].add(row.loss)
    again = sum(len(rows) - len({row.step for row in rows}) for rows in workers)
    return batch * (again + sum(len(each) - 1 for each in losses.values()))


def first_commit(workers: Iterable[Sequence[Row]], kill: Kill, world: int) -> Row | None:
    """Return the first commit of a step that a later group computed; None if there is none yet.

    ``world``: workers of the group that lost one. A step that this group had voted on does not count,
    although the survivors apply it after the death.
    """
    rows = [row for each in workers for row in each]
    old = max((row.generation for row in rows if row.world == world and row.step <= kill.step), default=-1)
    voted = max((row.step for row in rows if row.generation <= old), default=0)
    later = [row for row in rows if row.at > kill.at and row.generation > old and row.step > voted]
    return min(later, key=lambda row: row.at, default=None)


def recovery_of(kill: Kill, commit: Row, calls: Iterable[Call]) -> Recovery:
    """Return the parts of a recovery; ``calls``: those of the survivors."""
    during = [call for call in calls if kill.at < call.end and call.start < commit.at]
    joins = [call for call in during if call.name == "join_next_group" and call.start > kill.at]
    loads = [call for call in during if call.name == "load" and call.start > kill.at]
    detected = min((call.start for call in joins), default=kill.at)
    grouped = min((call.start for call in loads), default=max((call.end for call in joins), default=detected))
    loaded = max((call.end for call in loads), default=grouped)
    return Recovery(
        commit.at - kill.at, detected - kill.at, grouped - detected, loaded - grouped, commit.at - loaded
    )


class MovedState(NamedTuple):
    """State that moved because of a death, over what was trained on the machine that died.

    ``stage``: for the stages of the others, before they continue. ``mirror``: for their mirrors.
    """

    stage: float
    mirror: float


def moved_over_trained(kill: Kill, commit: Row, workers: Sequence[Sequence[Row]], dead: int) -> MovedState:
    """Return the state that moved because of a death; ``dead``: its place in ``workers``."""
    trained = next((row.trained_bytes for row in reversed(workers[dead]) if row.at <= kill.at), 0)
    stage = mirror = 0
    for place, rows in enumerate(workers):
        before = [row for row in rows if row.at <= kill.at]
        after = [row for row in rows if row.step >= commit.step and row.generation >= commit.generation]
        if place != dead and before and after:
            stage += after[0].moved_bytes - before[-1].moved_bytes
            mirror += after[0].mirrored_bytes - before[-1].mirrored_bytes
    return MovedState(stage / trained, mirror / trained) if trained else MovedState(0.0, 0.0)


def summary(recoveries: Sequence[Recovery]) -> dict[str, float | None]:
    """Return the 95th percentile of the whole time, and the medians of all parts."""
    return {
        "kill_to_commit_s_p95": p95([each.kill_to_commit_s for each in recoveries]),
        **{
            name: median(getattr(each, name) for each in recoveries) if recoveries else None
            for name in Recovery._fields
        },
    }
