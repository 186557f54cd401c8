"""Table of the steps that count: speed, time by phase, and gaps. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from barnraise.history.entries import PHASES, TICKS_PER_S, GroupStart, PlanAdopted, StepBatch
from barnraise.history.view import PhaseView, RatePoint

RECENT_STEPS = 100
MOST_RATES = 500


class StepTable:
    """Steps of a merged history, in order."""

    def __init__(self, batches: Sequence[StepBatch]) -> None:
        self._batches = batches
        self.samples = sum(sum(batch.samples) for batch in batches)
        self.first = batches[0].first if batches else 0
        self.end = max((batch.end for batch in batches), default=0)
        self.last_at = max((batch.at + sum(batch.ticks[1:]) / TICKS_PER_S for batch in batches), default=0.0)

    @property
    def missing(self) -> int:
        """Return how many steps between the first and the last one have no entry."""
        held = sum(batch.end - batch.first for batch in self._batches)
        return max(0, self.end - self.first - held)

    def step_s(self, first: int = 0, end: int | None = None, newest: int | None = None) -> float | None:
        """Return the median seconds of the steps in a range, of the ``newest`` ones only if given."""
        rows = [(ticks / stride, stride) for _, ticks, _, stride in self._rows(first, end)]
        rows = rows[-newest:] if newest else rows
        return statistics.median(ticks for ticks, _ in rows) / TICKS_PER_S if rows else None

    def recent_rates(self) -> tuple[float | None, float | None]:
        """Return the steps and the samples per second of the newest steps."""
        rows = list(self._rows(self.end - RECENT_STEPS, None))[1:] or list(self._rows(self.first, None))
        seconds = sum(row[1] for row in rows) / TICKS_PER_S
        if not seconds:
            return None, None
        return sum(row[3] for row in rows) / seconds, sum(row[2] for row in rows) / seconds

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

    def rates(self, groups: Sequence[GroupStart]) -> tuple[RatePoint, ...]:
        """Return the speed over the steps, in at most 500 points, with the machines that trained."""
        rows = list(self._rows(self.first, None))
        width = max(1, -(-len(rows) // MOST_RATES))
        times = self._times()
        points = []
        for start in range(0, len(rows), width):
            part = rows[start : start + width]
            seconds = sum(row[1] for row in part) / TICKS_PER_S
            if seconds:
                step = part[0][0]
                machines = _machines_at(groups, step)
                steps, samples = sum(row[3] for row in part), sum(row[2] for row in part)
                points.append(RatePoint(step, times[start], steps / seconds, samples / seconds, machines))
        return tuple(points)

    def _rows(self, first: int, end: int | None) -> Iterator[tuple[int, int, int, int]]:
        """Yield step, ticks, samples and stride of each row in a range."""
        for batch in self._batches:
            if batch.end <= first or (end is not None and batch.first >= end):
                continue
            for row, (ticks, samples) in enumerate(zip(batch.ticks, batch.samples, strict=False)):
                step = batch.first + row * batch.stride
                if step >= first and (end is None or step < end):
                    yield step, ticks, samples, batch.stride

    def _times(self) -> list[float]:
        """Return the time of the commit of each row."""
        times = []
        for batch in self._batches:
            at = batch.at
            for row, ticks in enumerate(batch.ticks):
                at += ticks / TICKS_PER_S if row else 0.0
                times.append(at)
        return times


def _machines_at(groups: Sequence[GroupStart], step: int) -> int:
    """Return how many machines trained a step."""
    before = [group for group in groups if group.step <= step and not group.is_provisional]
    newest = max(before, key=lambda group: group.generation, default=None)
    return len(set(newest.members)) if newest is not None else 1
