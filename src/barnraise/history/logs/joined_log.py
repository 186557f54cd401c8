"""Entries of one log by kind, with few large batches in place of many small ones. Pure.

Batches end at the same steps in all logs of a run, so that equal logs have equal batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from barnraise.history.entries import (
    MOST_ROWS,
    Entry,
    GroupStart,
    LinkSample,
    LogHead,
    MachineSample,
    OwnValues,
    StepBatch,
    ValueBatch,
)
from barnraise.history.logs.cuts import cut_steps, cut_values
from barnraise.history.logs.joins import continues, join_steps, join_values
from barnraise.history.logs.spans import row_count

Batch = TypeVar("Batch", bound=StepBatch | ValueBatch)


class _Joins(Generic[Batch]):
    """Batches of one kind in the order of the log; those before the last one do not change any more."""

    def __init__(
        self,
        join: Callable[[Sequence[Batch]], Batch],
        cut: Callable[[Batch, int, int], Iterator[Batch]],
    ) -> None:
        self._join, self._cut = join, cut
        self._closed: list[Batch] = []
        self._open: list[Batch] = []

    def add(self, batch: Batch) -> None:
        """Add a batch; it is divided where batches of all logs end."""
        for part in self._parts(batch):
            if self._open and (part.first % MOST_ROWS == 0 or not continues(self._open[-1], part)):
                self._close()
            self._open.append(part)

    def batches(self) -> list[Batch]:
        """Return all batches, joined."""
        if len(self._open) > 1:
            self._open = [self._join(self._open)]
        return [*self._closed, *self._open]

    def _close(self) -> None:
        self._closed.append(self._open[0] if len(self._open) == 1 else self._join(self._open))
        self._open = []

    def _parts(self, batch: Batch) -> Iterable[Batch]:
        """Return the parts of a batch; no row is divided."""
        rows, first, stride = row_count(batch), batch.first, batch.stride
        end = first + rows * stride
        border = first - first % MOST_ROWS + MOST_ROWS
        if end <= border:
            return (batch,) if rows else ()
        if (border - first) % stride:
            return (batch,)
        return [*self._cut(batch, first, border), *self._cut(batch, border, end)]


class JoinedLog:
    """Entries of one log. ``measured``: samples of machines and links; ``events``: all other entries.

    ``first_at``, ``last_at``: times of events and samples; 0 if there are none.
    """

    def __init__(self) -> None:
        self._steps, self._values = _Joins(join_steps, cut_steps), _Joins(join_values, cut_values)
        self.groups: list[GroupStart] = []
        self.own: list[OwnValues] = []
        self.measured: list[MachineSample | LinkSample] = []
        self.events: list[Entry] = []
        self.first_at = self.last_at = 0.0

    def add(self, entries: Iterable[Entry]) -> None:
        """Add entries that follow in the log."""
        for entry in entries:
            kind = type(entry)  # faster than a match; no entry has a subclass
            if kind is StepBatch:
                self._steps.add(entry)  # type: ignore[arg-type]
                continue
            if kind is ValueBatch:
                self._values.add(entry)  # type: ignore[arg-type]
                continue
            if kind is OwnValues:
                self.own.append(entry)  # type: ignore[arg-type]
                continue
            if kind is LogHead:
                continue
            if at := getattr(entry, "at", 0.0):
                self.first_at = min(at, self.first_at or at)
                self.last_at = max(at, self.last_at)
            if kind is MachineSample or kind is LinkSample:
                self.measured.append(entry)  # type: ignore[arg-type]
            elif kind is GroupStart:
                self.groups.append(entry)  # type: ignore[arg-type]
            else:
                self.events.append(entry)

    def steps(self) -> list[StepBatch]:
        """Return the steps in batches."""
        return self._steps.batches()

    def values(self) -> list[ValueBatch]:
        """Return the logged values in batches."""
        return self._values.batches()
