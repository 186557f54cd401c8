"""Merge of several logs into one history in which each committed step appears exactly once. Pure.

The newest group decides: steps of earlier groups count only below the step at which a later group started.
A step that several logs hold is taken from the finest one. Rows of several generations come after others.
Provisional steps only fill gaps.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from barnraise.history.columns import pack_column
from barnraise.history.entries import (
    CheckpointSaved,
    Entry,
    FailureNote,
    GroupStart,
    LogHead,
    MachineFacts,
    MachineSample,
    MembershipChange,
    OwnValues,
    PlanAdopted,
    RunEnd,
    RunStart,
    StepBatch,
    TrainingGoal,
    ValueBatch,
)
from barnraise.history.logs.cuts import steps_in, values_in
from barnraise.history.logs.spans import Interval, intervals, without_excess

_Group = tuple[bool, int]  # agreed, and the generation
_NO_BOUND = 10**12
_MOST_PARTS = 1 << 18  # of rows that lack steps; those of sixteen logs
# Training may go back and reach the same plan or checkpoint again.
_LATEST = RunEnd, MachineFacts, PlanAdopted, CheckpointSaved
_DEPARTURES = frozenset(["left", "paused", "evicted", "died", "refused"])


class Coverage:
    """Set of steps as sorted, disjoint intervals."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def gaps(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of the interval that are not in the set."""
        gaps = []
        index = bisect.bisect_right(self._ends, first)
        while first < end and index < len(self._starts) and self._starts[index] < end:
            if first < self._starts[index]:
                gaps.append((first, self._starts[index]))
            first = self._ends[index]
            index += 1
        return [*gaps, (first, end)] if first < end else gaps

    def add(self, first: int, end: int) -> None:
        """Add an interval of steps."""
        if first >= end:
            return
        low = bisect.bisect_left(self._ends, first)
        high = bisect.bisect_right(self._starts, end)
        if low < high:
            first, end = min(first, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high], self._ends[low:high] = [first], [end]

    @property
    def intervals(self) -> list[tuple[int, int]]:
        """Return the intervals, in order."""
        return list(zip(self._starts, self._ends, strict=True))


class MergedRows(NamedTuple):
    """Rows of several logs, each step once. ``groups``: with the number of steps that each has dropped."""

    groups: list[GroupStart]
    steps: list[StepBatch]
    values: list[ValueBatch]


def merge(logs: Iterable[Sequence[Entry]]) -> tuple[Entry, ...]:
    """Return one history of the entries of several logs of a run.

    Events come first, by time, then steps and values, by step. A merge of a merged history changes nothing.
    """
    entries = [entry for log in logs for entry in log]
    rows = merge_rows(
        [entry for entry in entries if isinstance(entry, GroupStart)],
        [entry for entry in entries if isinstance(entry, StepBatch)],
        [entry for entry in entries if isinstance(entry, ValueBatch)],
        [entry for entry in entries if isinstance(entry, OwnValues)],
    )
    events = distinct(
        entry
        for entry in entries
        if not isinstance(entry, StepBatch | ValueBatch | OwnValues | GroupStart | LogHead)
    )
    ordered = sorted([*events, *rows.groups], key=entry_time)
    return (*ordered, *rows.steps, *rows.values)


def merge_rows(
    starts: Sequence[GroupStart],
    batches: Sequence[StepBatch],
    values: Sequence[ValueBatch],
    own: Sequence[OwnValues],
) -> MergedRows:
    """Return the rows that count. A batch that counts wholly stays the same object."""
    batches = list(without_excess(batches, _MOST_PARTS))
    values = list(without_excess(values, _MOST_PARTS))
    groups = _first_starts(starts)
    agreed = _agreed(_starts(groups, batches))
    bounds = _Bounds(agreed)
    steps, dropped = _merge_steps(batches, bounds), _count_dropped(batches, agreed, bounds)
    counted = [
        msgspec.structs.replace(group, dropped=max(group.dropped, dropped.get(_key(group), 0)))
        for group in groups
    ]
    return MergedRows(counted, steps, _merge_values(values, own, bounds))


def _key(entry: GroupStart | StepBatch | ValueBatch | OwnValues) -> _Group:
    return not entry.is_provisional, entry.generation


def entry_time(entry: Entry) -> float:
    """Return the time by which events are ordered; facts about machines come first."""
    return 0.0 if isinstance(entry, MachineFacts) else getattr(entry, "at", 0.0)


def _identity(entry: Entry) -> Hashable:
    """Return what is equal for entries of several writers about one event."""
    match entry:
        case RunStart() | RunEnd():
            return type(entry)
        case MachineFacts(node=node):
            return MachineFacts, node
        case TrainingGoal(total=total, batch=batch, counts=counts, metric=metric):
            return TrainingGoal, total, batch, counts, metric
        case MembershipChange(node=node, change=change, generation=generation):
            # Agents may see the reason differently, so the direction counts.
            direction = "out" if change in _DEPARTURES else "joining" if change == "joining" else "in"
            return MembershipChange, node, direction, generation
        case PlanAdopted(step=step, name=name, sync=sync):
            return PlanAdopted, step, name, sync
        case CheckpointSaved(step=step, node=node):
            return CheckpointSaved, step, node
        case MachineSample(at=at, node=node):
            return MachineSample, at, node
        case FailureNote(node=node, rank=rank, start=start, code=code, signal=signal):
            return FailureNote, node, rank, start, code, signal
        case _:
            return msgspec.msgpack.encode(entry)


def distinct(entries: Iterable[Entry]) -> list[Entry]:
    """Return one entry for each event: the earliest one, or the latest one of the kinds in `_LATEST`."""
    kept: dict[Hashable, Entry] = {}
    for entry in sorted(entries, key=entry_time):
        if isinstance(entry, _LATEST):
            kept[_identity(entry)] = entry
        else:
            kept.setdefault(_identity(entry), entry)
    return list(kept.values())


def _first_starts(starts: Iterable[GroupStart]) -> list[GroupStart]:
    """Return one start for each group: of several writers, the one with the lowest step.

    The origin is the most telling one of any writer.
    """
    weight = {"kept": 0, "start": 1, "discarded": 2, "checkpoint": 3}
    chosen: dict[_Group, GroupStart] = {}
    for start in sorted(starts, key=lambda start: (start.step, start.at)):
        other = chosen.setdefault(_key(start), start)
        if weight[start.origin] > weight[other.origin] or start.dropped > other.dropped:
            chosen[_key(start)] = msgspec.structs.replace(
                other,
                origin=max(start.origin, other.origin, key=lambda origin: weight[origin]),
                dropped=max(start.dropped, other.dropped),
            )
    return list(chosen.values())


def _starts(groups: Iterable[GroupStart], batches: Iterable[StepBatch]) -> dict[_Group, int]:
    """Return the step at which each group started; if no writer has noted it, its first step."""
    starts: dict[_Group, int] = {}
    for batch in batches:
        if batch.oldest is None:
            starts[_key(batch)] = min(batch.first, starts.get(_key(batch), _NO_BOUND))
    return starts | {_key(group): group.step for group in groups}


class _Bounds:
    """Steps from which on those of a group do not count, because a later group started there.

    ``agreed``: generation and start of the groups with a quorum, in order.
    """

    def __init__(self, agreed: Sequence[tuple[int, int]]) -> None:
        self._generations = [generation for generation, _ in agreed]
        starts = [start for _, start in reversed(agreed)]
        self._lowest_after = list(accumulate(starts, min, initial=_NO_BOUND))[::-1]

    def of(self, generation: int) -> int:
        """Return the step from which on steps of a generation do not count."""
        return self._lowest_after[bisect.bisect_right(self._generations, generation)]


def _agreed(starts: Mapping[_Group, int]) -> list[tuple[int, int]]:
    """Return generation and start of the groups with a quorum, in order."""
    return sorted((generation, start) for (is_agreed, generation), start in starts.items() if is_agreed)


def _by_rank(batch: StepBatch | ValueBatch) -> tuple[bool, bool, int, int, int, int]:
    """Return the order in which batches are taken: agreed, newest and finest ones first.

    Of equal ones, that with the shortest first row: the row of a joining worker has its time of waiting, too.
    """
    is_mixed = batch.oldest is not None
    wait = batch.ticks[0] if isinstance(batch, StepBatch) and batch.ticks else 0
    return batch.is_provisional, is_mixed, -batch.generation, batch.stride, batch.first, wait


def _new_parts(batch: StepBatch | ValueBatch, covered: Coverage, bounds: _Bounds) -> list[Interval]:
    """Return the steps of a batch that count and are not covered yet, and cover them."""
    bound = bounds.of(batch.generation)
    parts = [gap for first, end in intervals(batch) for gap in covered.gaps(first, min(end, bound))]
    for first, end in parts:
        covered.add(first, end)
    return parts


def _merge_steps(batches: Iterable[StepBatch], bounds: _Bounds) -> list[StepBatch]:
    """Return the steps that count."""
    covered = Coverage()
    merged: list[StepBatch] = []
    for batch in sorted(batches, key=_by_rank):
        merged.extend(steps_in(batch, _new_parts(batch, covered, bounds)))
    return sorted(merged, key=lambda batch: batch.first)


def _count_dropped(
    batches: Iterable[StepBatch], agreed: Sequence[tuple[int, int]], bounds: _Bounds
) -> dict[_Group, int]:
    """Return, by group, how many earlier steps do not count because it was the first to start before them."""
    dropped: dict[_Group, Coverage] = defaultdict(Coverage)
    generations = [generation for generation, _ in agreed]
    for batch in batches:
        bound = bounds.of(batch.generation)
        for first, last in intervals(batch) if bound < batch.end else ():
            end = last
            for generation, start in agreed[bisect.bisect_right(generations, batch.generation) :]:
                if end <= max(first, bound):
                    break
                dropped[True, generation].add(max(first, start), end)
                end = min(end, start)
    return {key: sum(end - first for first, end in steps.intervals) for key, steps in dropped.items()}


def _merge_values(
    batches: Iterable[ValueBatch], own: Sequence[OwnValues], bounds: _Bounds
) -> list[ValueBatch]:
    """Return the logged values of each step once.

    The means of a step come with the next commit, which may be of a later group.
    """
    covered = Coverage()
    merged: list[ValueBatch] = []
    for batch in sorted(batches, key=_by_rank):
        merged.extend(values_in(batch, _new_parts(batch, covered, bounds)))
    merged.extend(_sum_own(own, covered, bounds))
    return sorted(merged, key=lambda batch: batch.first)


def _sum_own(own: Sequence[OwnValues], covered: Coverage, bounds: _Bounds) -> Iterable[ValueBatch]:
    """Add the workers' own sums of the steps whose means no commit has brought."""
    by_step: dict[tuple[int, _Group], dict[int, OwnValues]] = defaultdict(dict)
    for entry in own:
        key = _key(entry)
        if entry.step < bounds.of(entry.generation) and covered.gaps(entry.step, entry.step + 1):
            by_step[entry.step, key][entry.rank] = entry
    for step, key in sorted(by_step, key=lambda place: (place[0], not place[1][0], -place[1][1])):
        if not covered.gaps(step, step + 1):
            continue
        covered.add(step, step + 1)
        sums: dict[str, list[float]] = {}
        for entry in by_step[step, key].values():
            for name, total, weight in zip(entry.names, entry.sums, entry.weights, strict=False):
                both = sums.setdefault(name, [0.0, 0.0])
                both[0] += total
                both[1] += weight
        means = {name: total / weight for name, (total, weight) in sums.items() if weight}
        columns = tuple(pack_column([mean]) for mean in means.values())
        yield ValueBatch(key[1], step, tuple(means), columns, is_provisional=not key[0])
