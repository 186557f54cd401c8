"""Rows of committed steps, and the batches that they are written in. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from barnraise.history.columns import pack_column
from barnraise.history.entries import (
    LEAST_PHASES,
    MOST_ROWS,
    MOST_VALUES,
    PHASES,
    TICKS_PER_S,
    StepBatch,
    ValueBatch,
)

_MAX_NAME = 64
_MAX_TICKS = 1 << 45
_MOST_CELLS = 16 << 10  # of a batch of values: half a frame


class StepRow(NamedTuple):
    """One commit: ``stride`` steps from ``first`` on. ``seconds``: since the commit before.

    ``phases``: seconds of PHASES, as many as in batches.
    """

    generation: int
    first: int
    stride: int
    at: float
    seconds: float
    samples: int
    phases: tuple[float, ...]
    is_provisional: bool = False


class ValueRow(NamedTuple):
    """Logged values of one commit, averaged over all workers. ``generation``: in which they became known."""

    generation: int
    first: int
    stride: int
    values: Mapping[str, float]
    is_provisional: bool = False


def step_batches(rows: Iterable[StepRow]) -> list[StepBatch]:
    """Put rows into batches, as few as possible."""
    groups: list[list[StepRow]] = []
    for row in rows:
        if groups and len(groups[-1]) < MOST_ROWS and _continues(groups[-1][-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [
        StepBatch(
            generation=group[0].generation,
            first=group[0].first,
            at=group[0].at,
            ticks=tuple(_ticks(row.seconds) for row in group),
            samples=tuple(row.samples for row in group),
            phases=_columns([row.phases for row in group]),
            stride=group[0].stride,
            is_provisional=group[0].is_provisional,
        )
        for group in groups
    ]


def value_batches(rows: Iterable[ValueRow]) -> list[ValueBatch]:
    """Put rows into batches; rows with other names start a new one."""
    batches = []
    groups: list[list[ValueRow]] = []
    for row in rows:
        most_rows = min(MOST_ROWS, _MOST_CELLS // max(1, min(len(row.values), MOST_VALUES)))
        before = groups[-1][-1] if groups and len(groups[-1]) < most_rows else None
        if before is not None and _continues(before, row) and before.values.keys() == row.values.keys():
            groups[-1].append(row)
        else:
            groups.append([row])
    for group in groups:
        first = group[0]
        names = list(first.values)[:MOST_VALUES]
        batches.append(
            ValueBatch(
                first.generation,
                first.first,
                tuple(name[:_MAX_NAME] for name in names),
                tuple(pack_column([row.values[name] for row in group]) for name in names),
                first.stride,
                is_provisional=first.is_provisional,
            )
        )
    return batches


def _continues(before: StepRow | ValueRow, row: StepRow | ValueRow) -> bool:
    is_alike = before.generation == row.generation and before.is_provisional == row.is_provisional
    return is_alike and before.stride == row.stride and before.first + before.stride == row.first


def _ticks(seconds: float) -> int:
    return min(_MAX_TICKS, max(0, round(seconds * TICKS_PER_S))) if math.isfinite(seconds) else 0


def _columns(phases: Sequence[tuple[float, ...]]) -> tuple[tuple[int, ...], ...]:
    if any(not LEAST_PHASES <= len(row) <= len(PHASES) for row in phases):
        return ()
    columns = tuple(tuple(map(_ticks, column)) for column in zip_longest(*phases, fillvalue=0.0))
    return columns if any(map(any, columns[LEAST_PHASES:])) else columns[:LEAST_PHASES]


def phase_columns(batch: StepBatch) -> tuple[Sequence[int], ...]:
    """Return a column of ticks for each of PHASES, zeros where the batch has none; empty if none is known."""
    if not LEAST_PHASES <= len(batch.phases) <= len(PHASES):
        return ()
    missing = len(PHASES) - len(batch.phases)
    return (*batch.phases, *[(0,) * len(batch.ticks)] * missing)
