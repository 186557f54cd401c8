"""Rows that trackers get: the committed steps of a run with their values, and its events. Pure."""

from __future__ import annotations

import bisect
import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from math import isfinite
from typing import NamedTuple

import msgspec

from barnraise.core.sanitize import printable
from barnraise.history.columns import unpack_column
from barnraise.history.entries import (
    TICKS_PER_S,
    Entry,
    GroupStart,
    LinkSample,
    MachineSample,
    OwnValues,
    StepBatch,
    ValueBatch,
)
from barnraise.history.logs.spans import Interval, intervals, steps_per_row, united
from barnraise.history.merge import Coverage, merge
from barnraise.history.view import EventView, RunState, RunView
from barnraise.history.view_builder import build_view

_MOST_TEXT = 500
_UNSURE = 2  # newest steps that may still get values
GROUP = "run/group"  # the generation of the group, as a value
FIRST, COUNT = "run/first_step", "run/steps"  # of a row of several steps
_DURATION, _SPEED = "run/step_s", "run/samples_per_s"
_OWN = frozenset([GROUP, _DURATION, _SPEED])
LOWEST, HIGHEST = "run/lowest/", "run/highest/"  # and of its values
_NUMBERS = StepBatch | ValueBatch | OwnValues | MachineSample | LinkSample
_NOTED = frozenset(
    [
        "start",
        "end",
        "joined",
        "left",
        "paused",
        "resumed",
        "evicted",
        "died",
        "recovered",
        "plan",
        "rollback",
    ]
)


class LoggedRow(NamedTuple):
    """Values of some steps: the mean of each name, and of coarse rows the lowest and the highest one."""

    first: int
    last: int
    steps: int
    group: int
    values: Mapping[str, float]
    extremes: Mapping[str, tuple[float, float]]


class StepValues(NamedTuple):
    """Committed step, or several that the record holds as one. ``step``: the last one of them.

    ``group``: the generation in which it was committed; below zero if without a quorum. ``values`` name the
    first step and the number of steps if there are several. ``is_complete``: False if values of some workers
    are still to come. ``logged``: what the values of the script were made of.
    """

    step: int
    first: int
    group: int
    at: float
    values: Mapping[str, float]
    is_complete: bool = True
    logged: Sequence[LoggedRow] = ()


class RunNote(NamedTuple):
    """Event of a run in words. ``key`` stays the same if a log that arrives later tells it otherwise."""

    key: str
    at: float
    step: int | None
    text: str


class RunContent(NamedTuple):
    """Content of the record of a run now. ``steps``: by the last step of each; ``parts``: all of them.

    ``start``: the first step that a group trained. ``group_starts``: the first step of each group. ``view``:
    of the run, without its numbers.
    """

    steps: Sequence[StepValues]
    parts: Sequence[Interval]
    notes: Sequence[RunNote]
    start: int | None
    group_starts: Mapping[int, int]
    view: RunView

    @property
    def ended_at(self) -> float | None:
        """Return when the run ended; None if it goes on."""
        return self.view.ended_at

    @property
    def state(self) -> RunState:
        """Return the state of the run."""
        return self.view.state

    @property
    def has_ended(self) -> bool:
        """Tell whether the run has ended."""
        return self.ended_at is not None


def run_content(logs: Sequence[Sequence[Entry]], run: str) -> RunContent:
    """Return what the logs of a run say, merged."""
    merged = merge(logs)
    groups = [entry for entry in merged if isinstance(entry, GroupStart)]
    # The events and the state need no numbers, which are most of the record.
    view = build_view([entry for entry in merged if not isinstance(entry, _NUMBERS)], run=run)
    steps = _steps(logs, merged, groups)
    return RunContent(
        steps=steps,
        parts=united((row.first, row.step + 1) for row in steps),
        notes=_notes(view.events),
        start=min((group.step for group in groups), default=None),
        group_starts={_group(group): group.step for group in groups},
        view=msgspec.structs.replace(
            view,
            newest_at=max([view.newest_at or 0.0, *(row.at for row in steps)]) or None,
            step_s=steps[-1].values.get(_DURATION) if steps else None,
        ),
    )


def rest_of(row: StepValues, first: int) -> StepValues:
    """Return a row of several steps without those before ``first``, which a tracker has already."""
    left = [values for values in row.logged if values.last >= first]
    own = {name: value for name, value in row.values.items() if name in _OWN}
    count = min(row.values.get(COUNT, 1.0), row.step + 1.0 - first)
    return row._replace(
        first=first, values={**_means(left), **own, **_told(first, row.step, count)}, logged=left
    )


def _steps(
    logs: Iterable[Sequence[Entry]], merged: Sequence[Entry], groups: Sequence[GroupStart]
) -> list[StepValues]:
    """Return the rows of steps with the values whose last step is in each."""
    bare = sorted(_bare_steps(merged), key=_place)
    end = max((row.step + 1 for row in bare), default=0)
    waiting, known = _value_rows(merged, end - _UNSURE)
    partial = _partial_steps(logs, groups)
    rows: list[StepValues] = []
    lost: list[LoggedRow] = []  # their steps are in no log that is here
    for row in bare:
        own: list[LoggedRow] = []
        while waiting and waiting[0].last <= row.step:
            candidate = waiting.popleft()
            (own if candidate.last >= row.first else lost).append(candidate)
        count, values = row.values[COUNT], {**_means(own), **row.values}
        del values[COUNT]
        if count > 1 or row.first < row.step or any(each.first < row.first for each in own):
            values |= _told(min([row.first, *(each.first for each in own)]), row.step, count)
        # The means of a step come with the next commit: the two newest steps may get some.
        is_known = row.step < end - _UNSURE or not known.gaps(row.step, row.step + 1)
        is_partial = bool(partial) and any(row.first <= step <= row.step for step in partial)
        is_complete = is_known and not is_partial
        rows.append(StepValues(row.step, row.first, row.group, row.at, values, is_complete, own))
    rows += [_without_steps(values, bare) for values in (*lost, *waiting)]
    return sorted(rows, key=_place)


def _place(row: StepValues) -> tuple[int, int]:
    return row.step, row.first


def _bare_steps(merged: Iterable[Entry]) -> Iterator[StepValues]:
    """Yield the rows of steps with their time and number."""
    for batch in merged:
        if not isinstance(batch, StepBatch):
            continue
        at, group, count = batch.at, _group(batch), steps_per_row(batch)
        for row, (ticks, samples) in enumerate(zip(batch.ticks, batch.samples, strict=False)):
            seconds = ticks / TICKS_PER_S
            at += seconds if row else 0.0
            first = batch.first + row * batch.stride
            values = {_DURATION: seconds / count, GROUP: float(group), COUNT: float(count)}
            if seconds:
                values[_SPEED] = samples / seconds
            yield StepValues(first + batch.stride - 1, first, group, at, values)


def _without_steps(row: LoggedRow, steps: Sequence[StepValues]) -> StepValues:
    """Return values whose steps are not known, at the time of the steps before; the steps may still come."""
    place = bisect.bisect_right(steps, row.last, key=lambda step: step.step)
    at = steps[max(0, place - 1)].at if steps else 0.0
    values = {**_means([row]), GROUP: float(row.group), **_told(row.first, row.last, row.steps)}
    return StepValues(row.last, row.first, row.group, at, values, is_complete=False)


def _told(first: int, last: int, count: float) -> dict[str, float]:
    """Return what a tracker is told of the steps of a row, if there are several."""
    return {FIRST: float(first), COUNT: float(count)} if last > first else {}


def _means(rows: Sequence[LoggedRow]) -> Mapping[str, float]:
    """Return the mean of each value by the steps of the rows; of coarse rows, also the extremes."""
    if len(rows) == 1 and not rows[0].extremes:
        return rows[0].values
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row.values):
        named = [row for row in rows if name in row.values]
        total = sum(row.values[name] * row.steps for row in named)
        means[name] = total / sum(row.steps for row in named)
        extremes = [row.extremes.get(name, (row.values[name],) * 2) for row in named]
        low, high = min(low for low, _ in extremes), max(high for _, high in extremes)
        if low < high:
            means |= {f"{LOWEST}{name}": low, f"{HIGHEST}{name}": high}
    return means


def _group(entry: StepBatch | ValueBatch | GroupStart | OwnValues) -> int:
    return -1 - entry.generation if entry.is_provisional else entry.generation


def _value_rows(merged: Iterable[Entry], newest: int) -> tuple[deque[LoggedRow], Coverage]:
    """Return the rows with finite values by their last step, and the newest steps with known values."""
    rows: list[LoggedRow] = []
    known = Coverage()
    for batch in merged:
        if not isinstance(batch, ValueBatch):
            continue
        for first, end in intervals(batch):
            known.add(max(first, newest), end)
        steps, group = steps_per_row(batch), _group(batch)
        for row, (values, extremes) in enumerate(_finite_values(batch)):
            first = batch.first + row * batch.stride
            if values:
                rows.append(LoggedRow(first, first + batch.stride - 1, steps, group, values, extremes))
    return deque(sorted(rows, key=lambda row: row.last)), known


def _finite_values(
    batch: ValueBatch,
) -> Iterator[tuple[dict[str, float], Mapping[str, tuple[float, float]]]]:
    """Yield the finite means of each row by name, and their extremes if it is a coarse row."""
    names = [printable(name) for name in batch.names]
    means = zip_longest(*map(unpack_column, batch.columns), fillvalue=math.nan)
    rows = ({name: mean for name, mean in zip(names, row, strict=False) if isfinite(mean)} for row in means)
    if not batch.lows or not batch.highs:
        yield from ((row, {}) for row in rows)
        return
    lows = zip_longest(*map(unpack_column, batch.lows), fillvalue=math.nan)
    highs = zip_longest(*map(unpack_column, batch.highs), fillvalue=math.nan)
    for row, low, high in zip(rows, lows, highs, strict=False):
        pairs = zip(names, zip(low, high, strict=False), strict=False)
        yield row, {name: pair for name, pair in pairs if name in row and all(map(isfinite, pair))}


def _partial_steps(logs: Iterable[Sequence[Entry]], groups: Iterable[GroupStart]) -> set[int]:
    """Return the steps whose values only some of the workers have written."""
    members = {_group(group): len(group.members) for group in groups}
    means = Coverage()
    ranks: dict[tuple[int, int], set[int]] = defaultdict(set)
    for entry in (entry for log in logs for entry in log if isinstance(entry, OwnValues)):
        ranks[entry.step, _group(entry)].add(entry.rank)
    batches = [entry for log in logs for entry in log if isinstance(entry, ValueBatch)] if ranks else []
    for first, end in (part for batch in batches for part in intervals(batch)):
        means.add(first, end)
    return {
        step
        for (step, group), known in ranks.items()
        if means.gaps(step, step + 1) and len(known) < members.get(group, 1)
    }


def _notes(events: Iterable[EventView]) -> list[RunNote]:
    """Return the events that a tracker shows, with a key for each."""
    notes, counts = [], defaultdict[str, int](int)
    for event in events:
        if event.kind not in _NOTED:
            continue
        place = f"{event.kind} {event.node}"
        text = printable(event.text, limit=_MOST_TEXT)
        # Reasons and times may be corrected later; the machine, the kind and the count stay.
        key = hashlib.sha256(f"{place} {counts[place]}".encode()).hexdigest()[:16]
        counts[place] += 1
        notes.append(RunNote(key, event.at, event.step, text))
    return notes
