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
from barnraise.history.logs.joins import join_steps, join_values, joined, row_count

_MOST_ROUNDS = 64
_KEPT = LogHead, MachineFacts, RunStart, RunEnd, TrainingGoal, GroupStart

Batch = TypeVar("Batch", bound=StepBatch | ValueBatch)


def compact(entries: Sequence[Entry], most_bytes: int) -> tuple[Entry, ...]:
    """Return entries that take at most ``most_bytes``. Old events are dropped only as a last resort."""
    others: list[Entry] = [entry for entry in entries if not isinstance(entry, StepBatch | ValueBatch)]
    steps = joined([entry for entry in entries if isinstance(entry, StepBatch)], join_steps)
    values = joined([entry for entry in entries if isinstance(entry, ValueBatch)], join_values)
    for _ in range(_MOST_ROUNDS):
        if len(encode_frames([*others, *steps, *values])) <= most_bytes:
            break
        others = _thinned(others)
        if len(encode_frames(others)) > most_bytes:
            others = _without_oldest(others)
        steps = joined(_coarsened(steps, cut_steps, _halve_steps), join_steps)
        values = joined(_coarsened(values, cut_values, _halve_values), join_values)
    return (*others, *steps, *values)


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
