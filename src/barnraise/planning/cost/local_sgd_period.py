"""Length of a local SGD round, and the inner steps of each worker. Pure arithmetic.

All workers use inner batches of one size. Faster workers take more of them, so that all finish a round at
about the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from barnraise.planning.cost.quality_model import LONGEST_PERIOD
from barnraise.planning.cost.work_split import split_by_speed
from barnraise.planning.plan.calibration import exposed_transfer

# A round of one step is exact training, with needless extra work.
SHORTEST_PERIOD = 2

Times = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.float64]]


class LocalSgdRound(NamedTuple):
    """Wall time of a round in parts, and the inner steps of each worker."""

    counts: list[int]
    busy_s: float
    ideal_s: float
    visible_s: float
    rest_s: float

    @property
    def utilisation(self) -> float:
        return self.ideal_s / (self.busy_s + self.visible_s + self.rest_s)


class RoundWorkers(NamedTuple):
    """Facts that a round depends on besides its length.

    ``transfer_s`` is calibrated. ``rest_s`` cannot be hidden.
    """

    step_s: Sequence[float]
    transfer_s: float
    rest_s: float
    overlapped: bool


def needed_period(workers: RoundWorkers, target: float) -> int:
    """Return the fewest steps of a round, if steps could be split without remainder.

    With overlap, half a round must be long enough for the transfer. Otherwise computing, transfer and the
    rest follow each other, and computing must reach the ``target`` share.
    """
    step = len(workers.step_s) / sum(1 / each for each in workers.step_s)
    waiting = workers.rest_s if workers.overlapped else workers.transfer_s + workers.rest_s
    steps = waiting * target / (1 - target) / step
    if workers.overlapped:
        steps = max(steps, 2 * workers.transfer_s / step)
    # Rounding errors must not add a step.
    return max(1, math.ceil(steps * (1 - 1e-12)))


def round_of(workers: RoundWorkers, period: int) -> LocalSgdRound | None:
    """Return a round with ``period`` steps per worker on average; None if a worker would get no step."""
    speeds = [1 / step for step in workers.step_s]
    counts = split_by_speed(period * len(speeds), speeds)
    if min(counts) < 1:
        return None
    busy = max(count * step for count, step in zip(counts, workers.step_s, strict=True))
    hideable = busy / 2 if workers.overlapped else 0.0
    visible = exposed_transfer(workers.transfer_s, hideable, 0.0)
    return LocalSgdRound(counts, busy, period * len(speeds) / sum(speeds), visible, workers.rest_s)


def busy_times(step_s: Sequence[float]) -> Times:
    """Return how long the slowest worker computes in rounds of 1, 2, ... steps."""
    total = sum(1 / step for step in step_s)
    pieces = LONGEST_PERIOD * len(step_s)
    done = [step * numpy.arange(1, math.ceil(pieces / step / total) + 2) for step in step_s]
    finished: Times = numpy.sort(numpy.concatenate(done))[len(step_s) - 1 : pieces : len(step_s)]
    return finished


def smallest_period(workers: RoundWorkers, target: float, busy: Times) -> int | None:
    """Return the smallest period that reaches the target with whole steps; None if no allowed period does.

    ``busy``: the `busy_times` of these workers.
    """
    if needed_period(workers, target) > LONGEST_PERIOD:
        return None
    periods = numpy.arange(1, LONGEST_PERIOD + 1)
    visible = numpy.zeros_like(busy) if workers.overlapped else numpy.full_like(busy, workers.transfer_s)
    ideal = periods * len(workers.step_s) / sum(1 / step for step in workers.step_s)
    reached = ideal / (busy + visible + workers.rest_s) >= target * (1 - 1e-12)
    for period in periods[reached & (periods >= SHORTEST_PERIOD)].tolist():
        if is_enough(workers, period, target):
            return int(period)
    return None


def is_enough(workers: RoundWorkers, period: int, target: float) -> bool:
    """Return True if a round of this length keeps the workers busy; with overlap all transfer must be
    hidden.
    """
    timing = round_of(workers, period)
    if timing is None or timing.utilisation < target:
        return False
    return not workers.overlapped or timing.visible_s <= 1e-9 * timing.busy_s
