"""Joins of batches of which each continues the one before. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from barnraise.history.entries import MOST_ROWS, StepBatch, ValueBatch
from barnraise.history.log_format import MAX_BODY
from barnraise.history.logs.spans import row_count

_WIDTH = 4  # bytes of a value
_NUMBER = 9  # bytes of a number at most
# Bytes of a join: its frame must hold it, also after half the rows have got a lowest and a highest value.
_MOST_BYTES = MAX_BODY // 2

T = TypeVar("T")
Batch = TypeVar("Batch", bound=StepBatch | ValueBatch)


def joined(batches: Iterable[Batch], join: Callable[[Sequence[Batch]], Batch]) -> list[Batch]:
    """Join batches of which each continues the one before, up to MOST_ROWS rows and half a frame."""
    groups: list[list[Batch]] = []
    rows = size = 0
    for batch in batches:
        count, added = row_count(batch), _most_bytes(batch)
        fits = rows + count <= MOST_ROWS and size + added <= _MOST_BYTES
        if groups and fits and continues(groups[-1][-1], batch):
            groups[-1].append(batch)
            rows, size = rows + count, size + added
        else:
            groups.append([batch])
            rows, size = count, added
    return [group[0] if len(group) == 1 else join(group) for group in groups]


def continues(batch: StepBatch | ValueBatch, following: StepBatch | ValueBatch) -> bool:
    """Tell whether a batch starts where the one before ends, and both have the same whole columns."""
    end = batch.first + row_count(batch) * batch.stride
    is_alike = end == following.first and _form(batch) == _form(following)
    return is_alike and _has_columns(batch) and _has_columns(following) and is_whole(batch)


def join_steps(group: Sequence[StepBatch]) -> StepBatch:
    """Return one batch of batches that continue each other."""
    return msgspec.structs.replace(
        group[0],
        ticks=_chained(batch.ticks for batch in group),
        samples=_chained(batch.samples for batch in group),
        phases=tuple(map(_chained, zip(*(batch.phases for batch in group), strict=True))),
    )


def join_values(group: Sequence[ValueBatch]) -> ValueBatch:
    """Return one batch of batches that continue each other."""
    return msgspec.structs.replace(
        group[0],
        columns=tuple(map(b"".join, zip(*(batch.columns for batch in group), strict=True))),
        lows=tuple(map(b"".join, zip(*(batch.lows for batch in group), strict=True))),
        highs=tuple(map(b"".join, zip(*(batch.highs for batch in group), strict=True))),
    )


def _most_bytes(batch: StepBatch | ValueBatch) -> int:
    if isinstance(batch, StepBatch):
        return _NUMBER * (len(batch.ticks) + len(batch.samples) + sum(map(len, batch.phases)))
    return sum(map(len, (*batch.columns, *batch.lows, *batch.highs)))


def _form(batch: StepBatch | ValueBatch) -> tuple[object, ...]:
    """Return what batches of one join have in common."""
    columns: object = (
        len(batch.phases)
        if isinstance(batch, StepBatch)
        else (batch.names, len(batch.columns), len(batch.lows), len(batch.highs))
    )
    return batch.generation, batch.oldest, batch.stride, batch.is_provisional, columns


def is_whole(batch: StepBatch | ValueBatch) -> bool:
    """Tell whether all columns have equally many rows; those of other machines may not."""
    if isinstance(batch, StepBatch):
        rows = len(batch.ticks)
        return len(batch.samples) == rows and all(len(column) == rows for column in batch.phases)
    size = row_count(batch) * _WIDTH
    return all(len(column) == size for column in (*batch.columns, *batch.lows, *batch.highs))


def _has_columns(batch: StepBatch | ValueBatch) -> bool:
    """Tell whether a batch may have further rows."""
    return not batch.spans and (isinstance(batch, StepBatch) or bool(batch.columns))


def _chained(columns: Iterable[Sequence[T]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(columns))
