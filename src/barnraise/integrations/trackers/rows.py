"""Rows that trackers get: the committed steps of a run with their values, and its events. Pure."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

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
from barnraise.history.merge import merge
from barnraise.history.view import EventView, RunState
from barnraise.history.view_builder import build_view

_MOST_TEXT = 500
GROUP = "run/group"  # the generation of the group, as a value
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


class StepValues(NamedTuple):
    """Committed step, or several that the record holds as one. ``step``: the last one of them.

    ``group``: the generation in which it was committed; below zero if without a quorum.
    ``is_complete``: False if values of some workers are still to come.
    """

    step: int
    first: int
    group: int
    at: float
    values: Mapping[str, float]
    is_complete: bool = True


class RunNote(NamedTuple):
    """Event of a run in words. ``key`` stays the same if a log that arrives later tells it otherwise."""

    key: str
    at: float
    step: int | None
    text: str


class RunContent(NamedTuple):
    """Content of the record of a run now. ``start``: the first step that a group trained."""

    steps: Sequence[StepValues]
    notes: Sequence[RunNote]
    start: int | None
    ended_at: float | None
    state: RunState

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
    return RunContent(
        steps=list(_steps(logs, merged, groups)),
        notes=_notes(view.events),
        start=min((group.step for group in groups), default=None),
        ended_at=view.ended_at,
        state=view.state,
    )


def _steps(
    logs: Iterable[Sequence[Entry]], merged: Sequence[Entry], groups: Sequence[GroupStart]
) -> Iterator[StepValues]:
    values = _values(merged)
    partial = _partial_steps(logs, groups)
    batches = [entry for entry in merged if isinstance(entry, StepBatch)]
    end = max((batch.end for batch in batches), default=0)
    for batch in batches:
        at, group = batch.at, _group(batch)
        for row, (ticks, samples) in enumerate(zip(batch.ticks, batch.samples, strict=False)):
            seconds = ticks / TICKS_PER_S
            at += seconds if row else 0.0
            first = batch.first + row * batch.stride
            own = values.get(first, {})
            speed = {"run/step_s": seconds / batch.stride, GROUP: float(group)}
            if seconds:
                speed["run/samples_per_s"] = samples / seconds
            # The means of a step come with the next commit: the two newest steps may get some.
            is_known = bool(own) or first + batch.stride < end - 1
            yield StepValues(
                step=first + batch.stride - 1,
                first=first,
                group=group,
                at=at,
                values={**own, **speed},
                is_complete=is_known and first not in partial,
            )


def _group(entry: StepBatch | GroupStart | OwnValues) -> int:
    return -1 - entry.generation if entry.is_provisional else entry.generation


def _values(merged: Iterable[Entry]) -> dict[int, dict[str, float]]:
    """Return the finite values of each row, by its first step."""
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    for batch in merged:
        if not isinstance(batch, ValueBatch):
            continue
        for name, column in zip(batch.names, batch.columns, strict=False):
            for row, value in enumerate(unpack_column(column)):
                if math.isfinite(value):
                    by_step[batch.first + row * batch.stride][printable(name)] = value
    return by_step


def _partial_steps(logs: Iterable[Sequence[Entry]], groups: Iterable[GroupStart]) -> set[int]:
    """Return the steps whose values only some of the workers have written."""
    members = {_group(group): len(group.members) for group in groups}
    means: set[tuple[int, int]] = set()
    ranks: dict[tuple[int, int], set[int]] = defaultdict(set)
    for entry in (entry for log in logs for entry in log):
        if isinstance(entry, OwnValues):
            ranks[entry.step, _group(entry)].add(entry.rank)
        elif isinstance(entry, ValueBatch) and entry.columns:
            rows = len(entry.columns[0]) // 4
            means.update((entry.first + row * entry.stride, 0) for row in range(rows))
    return {
        step
        for (step, group), known in ranks.items()
        if (step, 0) not in means and len(known) < members.get(group, 1)
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
