"""Coarser rows: the older half of the rows becomes half as many. Pure.

Equal rows that follow each other in one batch stay in columns. A row that is alone in its batch is joined
with the next such row, of any length. How far apart they may be is a `Reach`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import TypeVar

import msgspec

from barnraise.history.columns import pack_column, unpack_column
from barnraise.history.entries import MOST_NAMES, TICKS_PER_S, StepBatch, ValueBatch
from barnraise.history.logs.cuts import cut_steps, cut_values
from barnraise.history.logs.joins import is_whole, join_steps, join_values, joined
from barnraise.history.logs.spans import intervals, row_count, spans_of, steps_per_row, united

_WIDTH = 4  # bytes of a value
_MOST_TICKS, _MOST_SAMPLES, _MOST_STRIDE = 1 << 45, 1 << 50, 1 << 30  # as entries allow
_ENOUGH = 0.9  # a round that leaves more of the rows reaches further the next time

Batch = TypeVar("Batch", bound=StepBatch | ValueBatch)


class Reach(IntEnum):
    """Distance of two rows that may become one. ``ANY``: between generations, too."""

    NEXT = 0
    GENERATION = 1
    ANY = 2


class CoarserRows:
    """Steps and values of one log, each step once, that become coarser with each round."""

    def __init__(self, steps: Sequence[StepBatch], values: Sequence[ValueBatch]) -> None:
        self.steps = joined(map(_whole_steps, steps), join_steps)
        self.values = joined(_with_long_gaps(map(_whole_values, values)), join_values)
        self._steps_reach = self._values_reach = Reach.NEXT

    @property
    def parts(self) -> int:
        """Return how many parts the rows have that lack steps."""
        spans = [*(batch.spans for batch in self.steps), *(batch.spans for batch in self.values)]
        return sum(len(each) // 2 + 1 for each in spans if each)

    @property
    def generations(self) -> set[int]:
        """Return the generations that rows name."""
        steps = {batch.generation for batch in self.steps}
        return steps | {batch.generation for batch in self.values}

    def close_gaps(self) -> None:
        """Let each row have half as many parts: it counts as if it had the steps of the smallest gaps."""
        self.steps = list(map(_with_fewer_parts, self.steps))
        self.values = list(map(_with_fewer_parts, self.values))

    def make_coarser(self) -> None:
        """Put the older half of the rows into half as many."""
        steps = joined(_by_kind(self.steps, self._steps_reach, _coarser_steps), join_steps)
        values = joined(_by_kind(self.values, self._values_reach, _coarser_values), join_values)
        self._steps_reach = _next_reach(self._steps_reach, self.steps, steps)
        self._values_reach = _next_reach(self._values_reach, self.values, values)
        self.steps, self.values = steps, values


def _next_reach(reach: Reach, before: Sequence[Batch], after: Sequence[Batch]) -> Reach:
    is_enough = sum(map(row_count, after)) <= _ENOUGH * sum(map(row_count, before))
    return reach if is_enough else Reach(min(reach + 1, Reach.ANY))


def _by_kind(
    batches: Sequence[Batch], reach: Reach, make: Callable[[Sequence[Batch], Reach], Iterable[Batch]]
) -> list[Batch]:
    """Make the rows coarser; steps that were trained without a quorum stay apart."""
    kinds = ([batch for batch in batches if batch.is_provisional is kind] for kind in (False, True))
    return sorted((batch for kind in kinds for batch in make(kind, reach)), key=attrgetter("first"))


def _coarser_steps(batches: Sequence[StepBatch], reach: Reach) -> Iterator[StepBatch]:
    return _coarser(batches, cut_steps, _halve_steps, lambda a, b: _pair_steps(a, b, reach))


def _coarser_values(batches: Sequence[ValueBatch], reach: Reach) -> Iterator[ValueBatch]:
    return _coarser(batches, cut_values, _halve_values, lambda a, b: _pair_values(a, b, reach))


def _coarser(
    batches: Sequence[Batch],
    cut: Callable[[Batch, int, int], Iterable[Batch]],
    halve: Callable[[Batch], Batch],
    pair: Callable[[Batch, Batch], Batch | None],
) -> Iterator[Batch]:
    """Put pairs of rows of the older half into one row each. ``pair`` returns None for rows that stay."""
    left = sum(map(row_count, batches)) // 2
    waiting: Batch | None = None  # a row that is alone
    for batch in batches:
        count = row_count(batch)
        pairs, left = min(count, max(0, left)) // 2, left - count
        middle = batch.first + 2 * pairs * batch.stride
        end = batch.first + count * batch.stride
        if count > 1 or left < 0:
            yield from () if waiting is None else (waiting,)
            waiting = None
        if pairs:
            yield from map(halve, cut(batch, batch.first, middle))
        rest = list(cut(batch, middle, end)) if middle < end else []
        if left < 0 or count - 2 * pairs != 1:
            yield from rest
            continue
        row = rest[0]
        both = pair(waiting, row) if waiting is not None else None
        if both is not None:
            yield both
            waiting = None
        else:
            yield from () if waiting is None else (waiting,)
            waiting = row
    yield from () if waiting is None else (waiting,)


# pairs of rows


def _halve_steps(batch: StepBatch) -> StepBatch:
    """Put each pair of rows into one row."""
    return msgspec.structs.replace(
        batch,
        at=batch.at + batch.ticks[1] / TICKS_PER_S,
        ticks=_pair_sums(batch.ticks, _MOST_TICKS),
        samples=_pair_sums(batch.samples, _MOST_SAMPLES),
        phases=tuple(_pair_sums(column, _MOST_TICKS) for column in batch.phases),
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


def _pair_steps(row: StepBatch, later: StepBatch, reach: Reach) -> StepBatch | None:
    """Return two rows as one, or None if they stay two."""
    if not _may_pair(row, later, reach):
        return None
    phases = zip(row.phases, later.phases, strict=True) if len(row.phases) == len(later.phases) else ()
    return msgspec.structs.replace(
        _spanning(row, later),
        at=later.at,
        ticks=_pair_sums(row.ticks + later.ticks, _MOST_TICKS),
        samples=_pair_sums(row.samples + later.samples, _MOST_SAMPLES),
        phases=tuple(_pair_sums(first + second, _MOST_TICKS) for first, second in phases),
    )


def _pair_values(row: ValueBatch, later: ValueBatch, reach: Reach) -> ValueBatch | None:
    """Return two rows as one with the names of both, or None if they stay two.

    Beyond `MOST_NAMES`, the names of the later row count.
    """
    names = tuple(dict.fromkeys((*row.names, *later.names)))
    if not _may_pair(row, later, reach) or (len(names) > MOST_NAMES and reach is not Reach.ANY):
        return None
    if not names:
        return _spanning(row, later)
    if len(names) > MOST_NAMES:
        names = tuple(dict.fromkeys((*later.names, *row.names)))[:MOST_NAMES]
    weights = steps_per_row(row), steps_per_row(later)
    known, known_later = _values_by_name(row), _values_by_name(later)
    rows = [_one_of(known.get(name), known_later.get(name), *weights) for name in names]
    columns, lows, highs = (
        tuple(pack_column([value]) for value in column) for column in zip(*rows, strict=True)
    )
    spanning = _spanning(row, later)
    return msgspec.structs.replace(spanning, names=names, columns=columns, lows=lows, highs=highs)


def _may_pair(row: StepBatch | ValueBatch, later: StepBatch | ValueBatch, reach: Reach) -> bool:
    """Tell whether two rows are near enough to become one."""
    if later.first + later.stride - row.first > _MOST_STRIDE:
        return False
    if reach is not Reach.ANY and (row.generation, row.oldest) != (later.generation, later.oldest):
        return False
    is_next = row.first + row.stride == later.first and not row.spans and not later.spans
    return is_next or reach is not Reach.NEXT


def _spanning(row: Batch, later: Batch) -> Batch:
    """Return a row with the steps of both."""
    parts = united([*intervals(row), *intervals(later)])
    newest = max(row.generation, later.generation)
    oldest = min(each.generation if each.oldest is None else each.oldest for each in (row, later))
    return msgspec.structs.replace(
        row,
        generation=newest,
        first=parts[0][0],
        stride=parts[-1][1] - parts[0][0],
        spans=spans_of(parts),
        oldest=oldest if oldest < newest else None,
    )


def _with_fewer_parts(row: Batch) -> Batch:
    parts = intervals(row)
    return msgspec.structs.replace(row, spans=spans_of(parts, max(1, len(parts) // 2))) if row.spans else row


def _pair_sums(column: Sequence[int], limit: int) -> tuple[int, ...]:
    return tuple(min(limit, column[row] + column[row + 1]) for row in range(0, len(column), 2))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _pairs(column: bytes, combine: Callable[[list[float]], float]) -> bytes:
    values = unpack_column(column)
    combined = []
    for row in range(0, len(values), 2):
        known = [value for value in values[row : row + 2] if not math.isnan(value)]
        combined.append(combine(known) if known else math.nan)
    return pack_column(combined)


_Value = tuple[float, float, float]  # mean, low, high


def _values_by_name(row: ValueBatch) -> dict[str, _Value]:
    """Return what is known of each name of a single row."""
    columns = (row.columns, row.lows or row.columns, row.highs or row.columns)
    rows = zip(*((unpack_column(column)[0] for column in each) for each in columns), strict=True)
    return {name: value for name, value in zip(row.names, rows, strict=True) if not math.isnan(value[0])}


def _one_of(value: _Value | None, later: _Value | None, weight: int, later_weight: int) -> _Value:
    """Return the mean of two values by their steps, with the extremes of both."""
    if value is None or later is None:
        return value or later or (math.nan, math.nan, math.nan)
    mean = (value[0] * weight + later[0] * later_weight) / (weight + later_weight)
    return mean, min(value[1], later[1]), max(value[2], later[2])


def _with_long_gaps(batches: Iterable[ValueBatch]) -> Iterator[ValueBatch]:
    """Yield the values; rows without values that follow each other are one."""
    gap: ValueBatch | None = None
    for batch in batches:
        if gap is not None and not batch.columns and _may_pair(gap, batch, Reach.NEXT):
            gap = _spanning(gap, batch)
            continue
        if gap is not None:
            yield gap
        gap = None if batch.columns else batch
        if batch.columns:
            yield batch
    if gap is not None:
        yield gap


# rows that a script may have written with unequal columns


def _whole_steps(batch: StepBatch) -> StepBatch:
    rows = row_count(batch)
    if is_whole(batch) and (not batch.spans or rows == 1):
        return batch
    samples = (batch.samples + (0,) * rows)[:rows]
    return msgspec.structs.replace(batch, samples=samples, phases=(), spans=())


def _whole_values(batch: ValueBatch) -> ValueBatch:
    size, count = _WIDTH * row_count(batch), min(len(batch.names), len(batch.columns))
    extremes = len(batch.lows), len(batch.highs)
    has_names = count == len(batch.names) == len(batch.columns)
    if has_names and extremes in ((0, 0), (count, count)) and is_whole(batch):
        return batch
    nothing = pack_column([math.nan]) * row_count(batch)
    columns = tuple((column + nothing[len(column) :])[:size] for column in batch.columns[:count])
    names = batch.names[:count]
    return msgspec.structs.replace(batch, names=names, columns=columns, lows=(), highs=(), spans=())
