"""Compaction of a log that has become too large: fewer frames, then coarser old steps. Pure.

The older half of the rows becomes coarser, until the log is small enough. Steps that do not count any more
are counted at the group that dropped them. Events have half of the room, and the oldest are dropped beyond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from barnraise.history.entries import (
    Entry,
    GroupStart,
    LinkSample,
    LogHead,
    MachineFacts,
    MachineSample,
    OwnValues,
    RunEnd,
    RunStart,
    StepBatch,
    TrainingGoal,
    ValueBatch,
)
from barnraise.history.log_format import encode_frames
from barnraise.history.logs.coarser import CoarserRows
from barnraise.history.logs.spans import intervals
from barnraise.history.merge import Coverage, MergedRows, distinct, merge_rows

MOST_PARTS = 1 << 14  # of all rows that lack steps
_MOST_ROUNDS = 64
_ONCE = RunStart, RunEnd, MachineFacts, TrainingGoal


def compact(entries: Sequence[Entry], most_bytes: int) -> tuple[Entry, ...]:
    """Return entries that take at most ``most_bytes``."""
    rows = merge_rows(
        [entry for entry in entries if isinstance(entry, GroupStart)],
        [entry for entry in entries if isinstance(entry, StepBatch)],
        [entry for entry in entries if isinstance(entry, ValueBatch)],
        (),
    )
    coarser = CoarserRows(rows.steps, rows.values)
    events = _Events(entries, rows)
    for _ in range(_MOST_ROUNDS):
        size = len(encode_frames([*events.entries, *coarser.steps, *coarser.values]))
        if coarser.parts > MOST_PARTS:
            coarser.close_gaps()
            continue
        if size <= most_bytes:
            break
        coarser.make_coarser()
        events.thin_out(most_bytes // 2, coarser.generations)
    return (*events.entries, *coarser.steps, *coarser.values)


class _Events:
    """Entries of a log that are neither steps nor their means."""

    def __init__(self, entries: Iterable[Entry], rows: MergedRows) -> None:
        rest = [e for e in entries if not isinstance(e, StepBatch | ValueBatch | GroupStart | LogHead)]
        self._once = _newest(entry for entry in rest if isinstance(entry, _ONCE))
        self._groups = sorted(rows.groups, key=lambda group: group.generation)
        self._own: list[Entry] = list(_unknown(rest, rows))
        self._others = [entry for entry in rest if not isinstance(entry, (*_ONCE, OwnValues))]

    @property
    def entries(self) -> list[Entry]:
        """Return the entries that are left."""
        return [*self._once, *self._groups, *self._others, *self._own]

    def thin_out(self, most_bytes: int, generations: set[int]) -> None:
        """Drop measurements, and what is old if the rest is too large. ``generations``: of the rows."""
        samples = [
            index for index, entry in enumerate(self._others) if isinstance(entry, MachineSample | LinkSample)
        ]
        dropped = set(samples[: len(samples) // 2 : 2])
        self._others = [entry for index, entry in enumerate(self._others) if index not in dropped]
        if len(encode_frames(self.entries)) <= most_bytes:
            return
        for entries in (self._others, self._own):
            if entries:
                del entries[: -(-len(entries) // 2)]
                return
        self._groups = _without_oldest(self._groups, generations)


def _newest(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries that count where a later one replaces an earlier one."""
    kept = distinct(entries)
    goals = [entry for entry in kept if isinstance(entry, TrainingGoal)]
    return [entry for entry in kept if not isinstance(entry, TrainingGoal) or entry is goals[-1]]


def _unknown(entries: Iterable[Entry], rows: MergedRows) -> Iterable[OwnValues]:
    """Return the workers' own sums of the steps whose means are not in the log."""
    known = Coverage()
    for batch in rows.values:
        for first, end in intervals(batch):
            known.add(first, end)
    for entry in entries:
        if isinstance(entry, OwnValues) and known.gaps(entry.step, entry.step + 1):
            yield entry


def _without_oldest(groups: Sequence[GroupStart], generations: set[int]) -> list[GroupStart]:
    """Drop groups of the older half that no row names: those that began without a gap, or else all.

    A later group takes over how many steps were dropped.
    """
    old = [group for group in groups[: -(-len(groups) // 2)] if group.generation not in generations]
    smooth = [group for group in old if group.origin == "kept" and not group.dropped]
    left_out = set(smooth or old)
    kept, dropped = [], 0
    for group in groups:
        dropped += group.dropped
        if group not in left_out:
            kept.append(msgspec.structs.replace(group, dropped=dropped))
            dropped = 0
    return kept
