"""Table of the steps that count: speed, time by phase, and gaps. Pure."""

from __future__ import annotations

import bisect
import itertools
import operator
import statistics
from collections.abc import Sequence

from barnraise.history.entries import PHASES, TICKS_PER_S, GroupStart, PlanAdopted, StepBatch
from barnraise.history.view import PhaseView, RatePoint

RECENT_STEPS = 100
MOST_RATES = 500


class StepTable:
    """Steps of a merged history in columns, in order. An update costs what has changed since the last one."""

    def __init__(self) -> None:
        self._batches: list[StepBatch] = []
        self._sums: list[tuple[int, ...]] = []  # of the ticks of each batch, and of its phases
        self._steps: list[int] = []
        self._ticks: list[int] = []
        self._samples: list[int] = []
        self._strides: list[int] = []
        self._times: list[float] = []
        self._medians: dict[tuple[int, int], float] = {}  # by rows

    def update(self, batches: Sequence[StepBatch]) -> None:
        """Take the steps of a history in place of those before; equal first batches are not read again."""
        same = common_start(self._batches, batches)
        rows = sum(len(batch.ticks) for batch in batches[:same])
        self._batches[same:] = batches[same:]
        self._sums[same:] = [_tick_sums(batch) for batch in batches[same:]]
        for column in (self._steps, self._ticks, self._samples, self._strides, self._times):
            del column[rows:]
        self._medians = {span: value for span, value in self._medians.items() if span[1] <= rows}
        for batch in batches[same:]:
            count = len(batch.ticks)
            self._steps.extend(range(batch.first, batch.end, batch.stride))
            self._ticks.extend(batch.ticks)
            self._samples.extend(batch.samples[:count] + (0,) * (count - len(batch.samples)))
            self._strides.extend([batch.stride] * count)
            ticks = itertools.accumulate((0, *batch.ticks[1:]))
            self._times.extend([batch.at + passed / TICKS_PER_S for passed in ticks][:count])

    @property
    def samples(self) -> int:
        """Return the samples of all steps."""
        return sum(self._samples)

    @property
    def first(self) -> int:
        """Return the first step."""
        return self._batches[0].first if self._batches else 0

    @property
    def end(self) -> int:
        """Return the step after the last one."""
        return max((batch.end for batch in self._batches), default=0)

    @property
    def first_at(self) -> float:
        """Return the time of the first commit; 0 if there is none."""
        return min((batch.at for batch in self._batches if batch.at), default=0.0)

    @property
    def last_at(self) -> float:
        """Return the time of the last commit; 0 if there is none."""
        return max(self._times, default=0.0)

    @property
    def missing(self) -> int:
        """Return how many steps between the first and the last one have no entry."""
        held = sum(batch.end - batch.first for batch in self._batches)
        return max(0, self.end - self.first - held)

    def step_s(self, first: int = 0, end: int | None = None, newest: int | None = None) -> float | None:
        """Return the median seconds of the steps in a range, of the ``newest`` ones only if given."""
        low, high = self._span(first, end)
        low = max(low, high - newest) if newest else low
        if low >= high:
            return None
        if (low, high) not in self._medians:
            ticks = list(map(operator.truediv, self._ticks[low:high], self._strides[low:high]))
            self._medians[low, high] = statistics.median(ticks) / TICKS_PER_S
        return self._medians[low, high]

    def recent_rates(self) -> tuple[float | None, float | None]:
        """Return the steps and the samples per second of the newest steps."""
        low, high = self._span(self.end - RECENT_STEPS, None)
        low = low + 1 if low + 1 < high else 0
        seconds = sum(self._ticks[low:]) / TICKS_PER_S
        if not seconds:
            return None, None
        return sum(self._strides[low:]) / seconds, sum(self._samples[low:]) / seconds

    def phases(self, plan: PlanAdopted | None) -> tuple[PhaseView, ...]:
        """Return the mean seconds of each phase of the newest steps, beside the plan's prediction."""
        sums, steps = [0] * len(PHASES), 0
        for batch in reversed(self._batches):
            if steps >= RECENT_STEPS:
                break
            if len(batch.phases) == len(PHASES):
                rows = -(-(RECENT_STEPS - steps) // batch.stride)
                sums = [total + sum(col[-rows:]) for total, col in zip(sums, batch.phases, strict=True)]
                steps += min(rows, len(batch.ticks)) * batch.stride
        predicted = plan.phases_s if plan is not None and len(plan.phases_s) == len(PHASES) else None
        if not steps and predicted is None:
            return ()
        return tuple(
            PhaseView(
                name=name,
                measured_s=sums[index] / steps / TICKS_PER_S if steps else None,
                predicted_s=predicted[index] if predicted is not None else None,
            )
            for index, name in enumerate(PHASES)
        )

    def phase_totals_s(self) -> dict[str, float]:
        """Return the seconds of all steps by phase; ``waiting``: between steps; ``unknown``: no phases."""
        totals: dict[str, int] = dict.fromkeys((*PHASES, "waiting", "unknown"), 0)
        for whole, *sums in self._sums:
            if sums:
                for name, ticks in zip(PHASES, sums, strict=True):
                    totals[name] += ticks
                totals["waiting"] += max(0, whole - sum(sums))
            else:
                totals["unknown"] += whole
        return {name: ticks / TICKS_PER_S for name, ticks in totals.items() if ticks}

    def rates(self, groups: Sequence[GroupStart]) -> tuple[RatePoint, ...]:
        """Return the speed over the steps, in at most 500 points, with the machines that trained."""
        width = max(1, -(-len(self._steps) // MOST_RATES))
        points = []
        for start in range(0, len(self._steps), width):
            part = slice(start, start + width)
            seconds = sum(self._ticks[part]) / TICKS_PER_S
            if seconds:
                step = self._steps[start]
                machines = _machines_at(groups, step)
                steps, samples = sum(self._strides[part]), sum(self._samples[part])
                point = RatePoint(step, self._times[start], steps / seconds, samples / seconds, machines)
                points.append(point)
        return tuple(points)

    def _span(self, first: int, end: int | None) -> tuple[int, int]:
        """Return the rows of a range of steps: the first one, and the one after the last."""
        low = bisect.bisect_left(self._steps, first)
        return low, len(self._steps) if end is None else bisect.bisect_left(self._steps, end)


def common_start(before: Sequence[object], after: Sequence[object]) -> int:
    """Return how many first items are equal in both."""
    pairs = enumerate(zip(before, after, strict=False))
    different = (place for place, (a, b) in pairs if a is not b and a != b)
    return next(different, min(len(before), len(after)))


def _tick_sums(batch: StepBatch) -> tuple[int, ...]:
    phases = batch.phases if len(batch.phases) == len(PHASES) else ()
    return sum(batch.ticks), *map(sum, phases)


def _machines_at(groups: Sequence[GroupStart], step: int) -> int:
    """Return how many machines trained a step."""
    before = [group for group in groups if group.step <= step and not group.is_provisional]
    newest = max(before, key=lambda group: group.generation, default=None)
    return len(set(newest.members)) if newest is not None else 1
