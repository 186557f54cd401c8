"""Steps that a batch has: a coarse row may lack some of those between its first and last one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import msgspec

from barnraise.history.entries import MOST_SPANS, StepBatch, ValueBatch

_WIDTH = 4  # bytes of a value
_MOST_PARTS = (MOST_SPANS + 1) // 2

Interval = tuple[int, int]  # the first step, and the one after the last
Batch = TypeVar("Batch", bound=StepBatch | ValueBatch)


def row_count(batch: StepBatch | ValueBatch) -> int:
    """Return the number of rows of a batch."""
    if isinstance(batch, StepBatch):
        return len(batch.ticks)
    if not batch.columns:
        return 0 if batch.names else 1
    return len(batch.columns[0]) // _WIDTH


def intervals(batch: StepBatch | ValueBatch) -> list[Interval]:
    """Return the steps of a batch as intervals, in order."""
    if batch.spans and _has_spans(batch):
        borders = list(accumulate(batch.spans, initial=batch.first))
        return list(pairwise(borders))[::2]
    count = row_count(batch)
    return [(batch.first, batch.first + count * batch.stride)] if count else []


def steps_per_row(batch: StepBatch | ValueBatch) -> int:
    """Return how many steps each row of a batch has."""
    return sum(batch.spans[::2]) if batch.spans and _has_spans(batch) else batch.stride


def united(parts: Iterable[Interval]) -> list[Interval]:
    """Return sorted intervals that do not touch each other, with the steps of all parts."""
    whole: list[Interval] = []
    for first, end in sorted(parts):
        if whole and first <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(whole[-1][1], end)
        else:
            whole.append((first, end))
    return whole


def spans_of(parts: Sequence[Interval], max_parts: int = _MOST_PARTS) -> tuple[int, ...]:
    """Return how many steps a row of these parts has and lacks in turn; nothing if it lacks none.

    ``parts`` come from `united`. Beyond ``max_parts``, those with the fewest steps between them become one.
    """
    if len(parts) > max_parts:
        gaps = sorted(after - before for (_, before), (after, _) in pairwise(parts))
        closed = gaps[len(parts) - max_parts - 1]
        wider = united((first, end + closed) for first, end in parts)
        parts = [(first, end - closed) for first, end in wider]
    if len(parts) < 2:
        return ()
    borders = [border for part in parts for border in part]
    return tuple(after - before for before, after in pairwise(borders))


def without_excess(batches: Iterable[Batch], max_parts: int) -> Iterator[Batch]:
    """Yield the batches; rows beyond this number of parts count as if they lacked no steps.

    No log of ours has more. Those of another machine must not take all of the time.
    """
    left = max_parts
    for batch in batches:
        left -= len(batch.spans) // 2
        yield msgspec.structs.replace(batch, spans=()) if batch.spans and left < 0 else batch


def _has_spans(batch: StepBatch | ValueBatch) -> bool:
    """Tell whether the spans fit the batch; those of other machines may not."""
    spans = batch.spans
    return len(spans) > 1 and len(spans) % 2 == 1 and row_count(batch) == 1 and sum(spans) == batch.stride
