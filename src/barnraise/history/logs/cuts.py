"""Parts of columns: steps and values of a range out of a batch. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from barnraise.history.entries import TICKS_PER_S, StepBatch, ValueBatch
from barnraise.history.logs.spans import Interval, intervals, row_count, spans_of, steps_per_row

_WIDTH = 4  # bytes of a value


def _spans(first: int, end: int, start: int, stride: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield rows of a batch that starts at ``start``: row, row after, first step, and steps of each row.

    A row of several steps that the range covers only in part is a span of its own, with fewer steps.
    """
    while first < end:
        row, inside = divmod(first - start, stride)
        whole = (end - first) // stride if inside == 0 else 0
        if whole:
            yield row, row + whole, first, stride
            first += whole * stride
        else:
            steps = min(stride - inside, end - first)
            yield row, row + 1, first, steps
            first += steps


def steps_in(batch: StepBatch, parts: Sequence[Interval]) -> Iterator[StepBatch]:
    """Yield the steps of these parts of a batch; ``parts``: sorted, of steps that the batch has."""
    if not batch.spans:
        for first, end in parts:
            yield from cut_steps(batch, first, end)
    elif parts == intervals(batch):
        yield batch
    elif parts:
        steps, among = sum(end - first for first, end in parts), steps_per_row(batch)
        yield msgspec.structs.replace(
            batch,
            first=parts[0][0],
            ticks=_divided(batch.ticks, steps, among),
            samples=_divided(batch.samples, steps, among),
            phases=tuple(_divided(column, steps, among) for column in batch.phases),
            stride=parts[-1][1] - parts[0][0],
            spans=spans_of(parts),
        )


def values_in(batch: ValueBatch, parts: Sequence[Interval]) -> Iterator[ValueBatch]:
    """Yield the values of these parts of a batch; ``parts``: sorted, of steps that the batch has."""
    if not batch.spans:
        for first, end in parts:
            yield from cut_values(batch, first, end)
    elif parts == intervals(batch):
        yield batch
    elif parts:
        stride = parts[-1][1] - parts[0][0]
        yield msgspec.structs.replace(batch, first=parts[0][0], stride=stride, spans=spans_of(parts))


def cut_steps(batch: StepBatch, first: int, end: int) -> Iterator[StepBatch]:
    """Yield the steps from ``first`` to before ``end``; a row that is cut is divided by its steps."""
    if (first, end) == (batch.first, batch.end):
        yield batch
        return
    ends = list(itertools.accumulate(batch.ticks))
    for row, row_end, step, steps in _spans(first, min(end, batch.end), batch.first, batch.stride):
        part = slice(row, row_end)
        yield msgspec.structs.replace(
            batch,
            first=step,
            at=batch.at + (ends[row] - ends[0]) / TICKS_PER_S,
            ticks=_divided(batch.ticks[part], steps, batch.stride),
            samples=_divided(batch.samples[part], steps, batch.stride),
            phases=tuple(_divided(column[part], steps, batch.stride) for column in batch.phases),
            stride=steps,
        )


def cut_values(batch: ValueBatch, first: int, end: int) -> Iterator[ValueBatch]:
    """Yield the values of the steps from ``first`` to before ``end``."""
    if (first, end) == (batch.first, batch.first + row_count(batch) * batch.stride):
        yield batch
        return
    for row, row_end, step, steps in _spans(first, end, batch.first, batch.stride):
        part = slice(row * _WIDTH, row_end * _WIDTH)
        yield msgspec.structs.replace(
            batch,
            first=step,
            columns=tuple(column[part] for column in batch.columns),
            lows=tuple(column[part] for column in batch.lows),
            highs=tuple(column[part] for column in batch.highs),
            stride=steps,
        )


def _divided(column: tuple[int, ...], steps: int, stride: int) -> tuple[int, ...]:
    return column if steps == stride else tuple(round(number * steps / stride) for number in column)
