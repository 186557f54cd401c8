"""Compaction of a log that has become too large: fewer frames, then coarser old steps. Pure.

Events are kept. The older half of the rows becomes rows of twice as many steps, until the log is small
enough. A row keeps the mean of each value, and its smallest and largest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from barnraise.history.columns import pack_column, unpack_column
from barnraise.history.entries import (
    MOST_ROWS,
    TICKS_PER_S,
    Entry,
    GroupStart,
    LinkSample,
    LogHead,
    MachineFacts,
    MachineSample,
    RunEnd,
    RunStart,
    StepBatch,
    TrainingGoal,
    ValueBatch,
)
from barnraise.history.log_format import encode_frames
from barnraise.history.logs.cuts import cut_steps, cut_values

_MOST_ROUNDS = 64
_KEPT = LogHead, MachineFacts, RunStart, RunEnd, TrainingGoal, GroupStart

T = TypeVar("T")
Batch = TypeVar("Batch", bound=StepBatch | ValueBatch)


def compact(entries: Sequence[Entry], most_bytes: int) -> tuple[Entry, ...]:
    """Return entries that take at most ``most_bytes``. Old events are dropped only as a last resort."""
    others: list[Entry] = [entry for entry in entries if not isinstance(entry, StepBatch | ValueBatch)]
    steps = _joined([entry for entry in entries if isinstance(entry, StepBatch)], _join_steps)
    values = _joined([entry for entry in entries if isinstance(entry, ValueBatch)], _join_values)
    for _ in range(_MOST_ROUNDS):
        if len(encode_frames([*others, *steps, *values])) <= most_bytes:
            break
        others = _thinned(others)
        if len(encode_frames(others)) > most_bytes:
            others = _without_oldest(others)
        steps = _joined(_coarsened(steps, cut_steps, _halve_steps), _join_steps)
        values = _joined(_coarsened(values, cut_values, _halve_values), _join_values)
    return (*others, *steps, *values)


def row_count(batch: StepBatch | ValueBatch) -> int:
    """Return the number of rows of a batch."""
    if isinstance(batch, StepBatch):
        return len(batch.ticks)
    return len(batch.columns[0]) // 4 if batch.columns else 0


def _joined(batches: Iterable[Batch], join: Callable[[Sequence[Batch]], Batch]) -> list[Batch]:
    """Join batches of which each continues the one before, up to MOST_ROWS rows."""
    groups: list[list[Batch]] = []
    rows = 0
    for batch in batches:
        count = row_count(batch)
        if groups and rows + count <= MOST_ROWS and _continues(groups[-1][-1], batch):
            groups[-1].append(batch)
            rows += count
        else:
            groups.append([batch])
            rows = count
    return [group[0] if len(group) == 1 else join(group) for group in groups]


def _continues(batch: StepBatch | ValueBatch, following: StepBatch | ValueBatch) -> bool:
    """Tell whether a batch starts where the one before ends, with the same columns."""

    def form(each: StepBatch | ValueBatch) -> tuple[object, ...]:
        columns = len(each.phases) if isinstance(each, StepBatch) else (each.names, len(each.lows))
        return each.generation, each.stride, each.is_provisional, columns

    end = batch.first + row_count(batch) * batch.stride
    return end == following.first and form(batch) == form(following)


def _join_steps(group: Sequence[StepBatch]) -> StepBatch:
    return msgspec.structs.replace(
        group[0],
        ticks=_chained(batch.ticks for batch in group),
        samples=_chained(batch.samples for batch in group),
        phases=tuple(map(_chained, zip(*(batch.phases for batch in group), strict=True))),
    )


def _join_values(group: Sequence[ValueBatch]) -> ValueBatch:
    return msgspec.structs.replace(
        group[0],
        columns=tuple(map(b"".join, zip(*(batch.columns for batch in group), strict=True))),
        lows=tuple(map(b"".join, zip(*(batch.lows for batch in group), strict=True))),
        highs=tuple(map(b"".join, zip(*(batch.highs for batch in group), strict=True))),
    )


def _chained(columns: Iterable[Sequence[T]]) -> tuple[T, ...]:
    return tuple(item for column in columns for item in column)


def _coarsened(
    batches: Sequence[Batch],
    cut: Callable[[Batch, int, int], Iterable[Batch]],
    halve: Callable[[Batch], Batch],
) -> list[Batch]:
    """Put the older half of the rows into half as many rows."""
    left = sum(map(row_count, batches)) // 2
    coarse: list[Batch] = []
    for batch in batches:
        count = row_count(batch)
        rows = min(count, left) // 2 * 2
        left -= count
        middle = batch.first + rows * batch.stride
        end = batch.first + count * batch.stride
        if rows <= 0:
            coarse.append(batch)
            continue
        coarse.extend(map(halve, cut(batch, batch.first, middle)))
        coarse.extend(cut(batch, middle, end) if middle < end else ())
    return coarse


def _halve_steps(batch: StepBatch) -> StepBatch:
    """Put each pair of rows into one row."""
    return msgspec.structs.replace(
        batch,
        at=batch.at + batch.ticks[1] / TICKS_PER_S,
        ticks=_pair_sums(batch.ticks),
        samples=_pair_sums(batch.samples),
        phases=tuple(map(_pair_sums, batch.phases)),
        stride=2 * batch.stride,
    )


def _halve_values(batch: ValueBatch) -> ValueBatch:
    """Put each pair of rows into one row."""
    lows, highs = batch.lows or batch.columns, batch.highs or batch.columns
    return msgspec.structs.replace(
        batch,
        columns=tuple(_pairs(column, _mean) for column in batch.columns),
        lows=tuple(_pairs(column, min) for column in lows),
        highs=tuple(_pairs(column, max) for column in highs),
        stride=2 * batch.stride,
    )


def _pair_sums(column: Sequence[int]) -> tuple[int, ...]:
    return tuple(column[row] + column[row + 1] for row in range(0, len(column), 2))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _pairs(column: bytes, combine: Callable[[list[float]], float]) -> bytes:
    values = unpack_column(column)
    combined = []
    for row in range(0, len(values), 2):
        known = [value for value in values[row : row + 2] if not math.isnan(value)]
        combined.append(combine(known) if known else math.nan)
    return pack_column(combined)


def _thinned(entries: Sequence[Entry]) -> list[Entry]:
    """Drop every other measurement of machines and links from the older half."""
    samples = [index for index, entry in enumerate(entries) if isinstance(entry, MachineSample | LinkSample)]
    dropped = set(samples[: len(samples) // 2 : 2])
    return [entry for index, entry in enumerate(entries) if index not in dropped]


def _without_oldest(entries: Sequence[Entry]) -> list[Entry]:
    """Drop the older half of the events; what a display needs at all is kept."""
    events = [index for index, entry in enumerate(entries) if not isinstance(entry, _KEPT)]
    dropped = set(events[: -(-len(events) // 2)])
    return [entry for index, entry in enumerate(entries) if index not in dropped]
