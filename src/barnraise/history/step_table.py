"""Table of the steps that count: speed, time by phase, and gaps. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from barnraise.history.entries import PHASES, TICKS_PER_S, GroupStart, PlanAdopted, StepBatch
from barnraise.history.view import PhaseView, RatePoint

RECENT_STEPS = 100
MOST_RATES = 500


class Pace(NamedTuple):
    """Means of some steps. ``phases_s``: seconds of each of PHASES, or none if they are unknown."""

    steps: int
    step_s: float
    samples_per_s: float
    phases_s: tuple[float, ...]


class _Row(NamedTuple):
    """Row of a batch: ``stride`` steps from ``step`` on."""

    batch: StepBatch
    place: int
    step: int

    @property
    def ticks(self) -> int:
        return self.batch.ticks[self.place]

    @property
    def samples(self) -> int:
        return self.batch.samples[self.place]


class StepTable:
    """Steps of a merged history, in order."""

    def __init__(self, batches: Sequence[StepBatch]) -> None:
        self._batches = batches
        # First steps of groups: their rows also have the time of the change of machines before them.
        self._changes = tuple(
            batch.first
            for before, batch in zip((None, *batches), batches, strict=False)
            if before is None or before.generation != batch.generation
        )
        self.samples = sum(sum(batch.samples) for batch in batches)
        self.first = batches[0].first if batches else 0
        self.end = max((batch.end for batch in batches), default=0)
        self.last_at = max((batch.at + sum(batch.ticks[1:]) / TICKS_PER_S for batch in batches), default=0.0)

    @property
    def missing(self) -> int:
        """Return how many steps between the first and the last one have no entry."""
        held = sum(batch.end - batch.first for batch in self._batches)
        return max(0, self.end - self.first - held)

    def recent(self, plan: PlanAdopted | None) -> Pace | None:
        """Return the means of the newest steps: at most 100, of the present group under the newest plan.

        Where no such step is known yet, those before count.
        """
        oldest = self.end - RECENT_STEPS
        first = max([oldest, *self._changes[-1:], *([plan.step] if plan is not None else [])])
        for start in (first, oldest, self.first):
            if (pace := self._mean(start, None)) is not None:
                return pace
        return _mean_of(list(self._rows(self.first, None)))

    def pace(self, first: int, end: int | None) -> Pace | None:
        """Return the means of the steps in a range, as far as one group trained them; or None."""
        later = [change for change in self._changes if change > first]
        return self._mean(first, min([*later, *([end] if end is not None else [])], default=None))

    def _mean(self, first: int, end: int | None) -> Pace | None:
        return _mean_of([row for row in self._rows(first, end) if row.step not in self._changes])

    def phases(self, plan: PlanAdopted | None) -> tuple[PhaseView, ...]:
        """Return the mean seconds of each phase of the newest steps, beside the plan's prediction."""
        pace = self.recent(plan)
        measured = pace.phases_s if pace is not None else ()
        predicted = plan.phases_s if plan is not None and len(plan.phases_s) == len(PHASES) else ()
        if not measured and not predicted:
            return ()
        return tuple(
            PhaseView(
                name=name,
                measured_s=measured[index] if measured else None,
                predicted_s=(predicted[index] or None) if predicted else None,  # 0: no plan predicts it
            )
            for index, name in enumerate(PHASES)
        )

    def phase_totals_s(self) -> dict[str, float]:
        """Return the seconds of all steps by phase; ``waiting``: between steps; ``unknown``: no phases."""
        totals: dict[str, int] = dict.fromkeys((*PHASES, "waiting", "unknown"), 0)
        for batch in self._batches:
            whole = sum(batch.ticks)
            if len(batch.phases) == len(PHASES):
                sums = [sum(column) for column in batch.phases]
                for name, ticks in zip(PHASES, sums, strict=True):
                    totals[name] += ticks
                totals["waiting"] += max(0, whole - sum(sums))
            else:
                totals["unknown"] += whole
        return {name: ticks / TICKS_PER_S for name, ticks in totals.items() if ticks}

    def samples_between(self, start: float, end: float) -> int:
        """Return the samples of the steps that were committed in a time."""
        times, sums = self._samples_until
        return sums[bisect.bisect_right(times, end)] - sums[bisect.bisect_right(times, min(start, end))]

    def rates(self, groups: Sequence[GroupStart]) -> tuple[RatePoint, ...]:
        """Return the speed over the steps, in at most 500 points, with the machines that trained."""
        rows = list(self._rows(self.first, None))
        width = max(1, -(-len(rows) // MOST_RATES))
        points = []
        for start in range(0, len(rows), width):
            part = rows[start : start + width]
            seconds = sum(row.ticks for row in part) / TICKS_PER_S
            if seconds:
                machines = _machines_at(groups, part[0].step)
                steps, samples = sum(row.batch.stride for row in part), sum(row.samples for row in part)
                at = self._commits[start][0]
                points.append(RatePoint(part[0].step, at, steps / seconds, samples / seconds, machines))
        return tuple(points)

    def _rows(self, first: int, end: int | None) -> Iterator[_Row]:
        """Yield each row that has steps in a range."""
        for batch in self._batches:
            if batch.end <= first or (end is not None and batch.first >= end):
                continue
            for place in range(min(len(batch.ticks), len(batch.samples))):
                step = batch.first + place * batch.stride
                if step + batch.stride > first and (end is None or step < end):
                    yield _Row(batch, place, step)

    @cached_property
    def _samples_until(self) -> tuple[list[float], list[int]]:
        """Return the times of all commits in order, and the samples before each and after the last."""
        commits = sorted(self._commits)
        return [at for at, _ in commits], list(accumulate((samples for _, samples in commits), initial=0))

    @cached_property
    def _commits(self) -> list[tuple[float, int]]:
        """Return the time of the commit of each row, and its samples."""
        commits = []
        for batch in self._batches:
            at = batch.at
            for place, (ticks, samples) in enumerate(zip(batch.ticks, batch.samples, strict=False)):
                at += ticks / TICKS_PER_S if place else 0.0
                commits.append((at, samples))
        return commits


def _mean_of(rows: Sequence[_Row]) -> Pace | None:
    steps, ticks = sum(row.batch.stride for row in rows), sum(row.ticks for row in rows)
    if not steps or not ticks:
        return None
    timed = [row for row in rows if len(row.batch.phases) == len(PHASES)]
    phases = [sum(row.batch.phases[phase][row.place] for row in timed) for phase in range(len(PHASES))]
    return Pace(
        steps=steps,
        step_s=ticks / steps / TICKS_PER_S,
        samples_per_s=sum(row.samples for row in rows) / ticks * TICKS_PER_S,
        phases_s=tuple(sums / steps / TICKS_PER_S for sums in phases) if len(timed) == len(rows) else (),
    )


def _machines_at(groups: Sequence[GroupStart], step: int) -> int:
    """Return how many machines trained a step."""
    before = [group for group in groups if group.step <= step and not group.is_provisional]
    newest = max(before, key=lambda group: group.generation, default=None)
    return len(set(newest.members)) if newest is not None else 1
