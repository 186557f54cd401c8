"""Table of the steps that count: speed, time by phase, and gaps. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from barnraise.history.entries import LEAST_PHASES, PHASES, TICKS_PER_S, GroupStart, PlanAdopted, StepBatch
from barnraise.history.step_rows import phase_columns
from barnraise.history.view import PhaseView, RatePoint

RECENT_STEPS = 100
MOST_RATES = 500


class Pace(NamedTuple):
    """Means of some steps."""

    steps: int
    step_s: float
    samples_per_s: float


class _Span(NamedTuple):
    """Rows of a table from ``low`` to before ``high``, without those that are left out."""

    low: int
    high: int
    left_out: tuple[int, ...] = ()

    def rows(self) -> list[int]:
        return [row for row in range(self.low, self.high) if row not in self.left_out]


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
        self._phases: list[tuple[int, ...]] = []  # ticks of each of PHASES, or none if they are unknown
        self._totals: list[tuple[int, int, int]] = [(0, 0, 0)]  # steps, ticks and samples before each row
        self._commits: tuple[list[float], list[int]] | None = None
        self._changes: list[int] = []  # first steps of groups; their rows have the time of the change, too

    def update(self, batches: Sequence[StepBatch]) -> None:
        """Take the steps of a history in place of those before; equal first batches are not read again."""
        same = common_start(self._batches, batches)
        rows = sum(len(batch.ticks) for batch in batches[:same])
        self._batches[same:] = batches[same:]
        self._sums[same:] = [_tick_sums(batch) for batch in batches[same:]]
        columns = self._steps, self._ticks, self._samples, self._strides, self._times, self._phases
        for column in columns:
            del column[rows:]
        del self._totals[rows + 1 :]
        self._commits = None
        generations = (None, *(batch.generation for batch in batches))
        pairs = zip(generations, batches, strict=False)
        self._changes = [batch.first for before, batch in pairs if before != batch.generation]
        for batch in batches[same:]:
            count = len(batch.ticks)
            self._steps.extend(range(batch.first, batch.end, batch.stride))
            self._ticks.extend(batch.ticks)
            self._samples.extend(batch.samples[:count] + (0,) * (count - len(batch.samples)))
            self._strides.extend([batch.stride] * count)
            ticks = itertools.accumulate((0, *batch.ticks[1:]))
            self._times.extend([batch.at + passed / TICKS_PER_S for passed in ticks][:count])
            phases = list(itertools.islice(zip(*phase_columns(batch), strict=False), count))
            self._phases.extend([*phases, *[()] * (count - len(phases))])
        steps, ticks_before, samples = self._totals[-1]
        for row in range(rows, len(self._steps)):
            steps, ticks_before = steps + self._strides[row], ticks_before + self._ticks[row]
            samples += self._samples[row]
            self._totals.append((steps, ticks_before, samples))

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

    def recent(self, plan: PlanAdopted | None) -> Pace | None:
        """Return the means of the newest steps: at most 100, of the present group under the newest plan.

        Where no such step is known yet, those before count.
        """
        return self._mean_of(self._recent_span(plan))

    def pace(self, first: int, end: int | None) -> Pace | None:
        """Return the means of the steps in a range, as far as one group trained them; or None."""
        later = [change for change in self._changes if change > first]
        ends = [*later, *([end] if end is not None else [])]
        return self._mean_of(self._span(first, min(ends, default=None)))

    def phases(self, plan: PlanAdopted | None) -> tuple[PhaseView, ...]:
        """Return the mean seconds of each phase of the newest steps, beside the plan's prediction."""
        rows = self._recent_span(plan).rows()
        steps = sum(self._strides[row] for row in rows)
        is_known = steps > 0 and all(self._phases[row] for row in rows)
        planned = plan.phases_s if plan is not None else ()
        predicted = (*planned, 0.0)[: len(PHASES)] if len(planned) >= LEAST_PHASES else ()
        if not is_known and not predicted:
            return ()
        phases = [
            PhaseView(
                name=name,
                measured_s=sum(self._phases[row][index] for row in rows) / steps / TICKS_PER_S
                if is_known
                else None,
                predicted_s=(predicted[index] or None) if predicted else None,  # 0: no plan predicts it
            )
            for index, name in enumerate(PHASES)
        ]
        of_split = [phase for phase in phases[LEAST_PHASES:] if phase.measured_s or phase.predicted_s]
        return (*phases[:LEAST_PHASES], *of_split)

    def samples_between(self, start: float, end: float) -> int:
        """Return the samples of the steps that were committed in a time."""
        if self._commits is None:
            commits = sorted(zip(self._times, self._samples, strict=True))
            sums = list(itertools.accumulate((samples for _, samples in commits), initial=0))
            self._commits = [at for at, _ in commits], sums
        times, sums = self._commits
        return sums[bisect.bisect_right(times, end)] - sums[bisect.bisect_right(times, min(start, end))]

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

    def _span(self, first: int, end: int | None) -> _Span:
        """Return the rows with steps in a range, without those of a change of machines."""
        low = bisect.bisect_left(self._steps, first)
        if low and self._steps[low - 1] + self._strides[low - 1] > first:
            low -= 1
        high = len(self._steps) if end is None else bisect.bisect_left(self._steps, end)
        changes = {bisect.bisect_left(self._steps, change) for change in self._changes}
        return _Span(low, max(low, high), tuple(row for row in changes if low <= row < high))

    def _mean_of(self, span: _Span) -> Pace | None:
        before, until = self._totals[span.low], self._totals[span.high]
        steps, ticks, samples = (high - low for low, high in zip(before, until, strict=True))
        for row in span.left_out:
            steps, ticks = steps - self._strides[row], ticks - self._ticks[row]
            samples -= self._samples[row]
        if not steps or not ticks:
            return None
        return Pace(steps, ticks / steps / TICKS_PER_S, samples / ticks * TICKS_PER_S)

    def _recent_span(self, plan: PlanAdopted | None) -> _Span:
        oldest = self.end - RECENT_STEPS
        first = max([oldest, *self._changes[-1:], *([plan.step] if plan is not None else [])])
        for start in (first, oldest, self.first):
            span = self._span(start, None)
            if self._mean_of(span) is not None:
                return span
        return _Span(0, len(self._steps))


def common_start(before: Sequence[object], after: Sequence[object]) -> int:
    """Return how many first items are equal in both."""
    pairs = enumerate(zip(before, after, strict=False))
    different = (place for place, (a, b) in pairs if a is not b and a != b)
    return next(different, min(len(before), len(after)))


def _tick_sums(batch: StepBatch) -> tuple[int, ...]:
    return sum(batch.ticks), *map(sum, phase_columns(batch))


def _machines_at(groups: Sequence[GroupStart], step: int) -> int:
    """Return how many machines trained a step."""
    before = [group for group in groups if group.step <= step and not group.is_provisional]
    newest = max(before, key=lambda group: group.generation, default=None)
    return len(set(newest.members)) if newest is not None else 1
