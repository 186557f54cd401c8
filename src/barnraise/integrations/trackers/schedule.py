"""Schedule of writes: which steps a tracker gets now, which wait, and what arrived too late. Pure.

Steps are written in order. A step waits for its values and for the steps before it, at most ``SETTLE_S``.
After a rollback, the tracker goes back to the first step that counts in another group.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from barnraise.integrations.trackers.rows import FIRST, RunContent, RunNote, StepValues, rest_of

SETTLE_S = 30.0  # longer than a copier needs for another machine's log
MOST_KEPT = 2000  # newest steps whose values are compared with what arrives later


class NextWrites(NamedTuple):
    """Writes that are due. ``back_to``: the step at which the tracker starts again; None: it goes on.

    ``late``: sentences about values that a tracker without updates does not get any more.
    """

    back_to: int | None
    steps: Sequence[StepValues]
    notes: Sequence[RunNote]
    late: Sequence[str]
    waits: bool


@dataclass
class Written:
    """Content of a tracker. ``next``: the step after the last one; ``groups``: by their first steps."""

    next: int | None = None
    groups: list[tuple[int, int]] = field(default_factory=list)
    values: dict[int, Mapping[str, float]] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)

    def add(self, step: int, group: int, values: Mapping[str, float]) -> None:
        """Add a step that was written."""
        self.next = step + 1
        if not self.groups or self.groups[-1][1] != group:
            self.groups.append((step, group))
        self.values[step] = values
        if len(self.values) > MOST_KEPT:
            del self.values[next(iter(self.values))]

    def go_back(self, step: int) -> None:
        """Forget a step and all after it."""
        self.next = step
        self.groups = [item for item in self.groups if item[0] < step]
        self.values = {key: values for key, values in self.values.items() if key < step}

    def group_of(self, step: int) -> int | None:
        """Return the group in which a written step counted."""
        place = bisect.bisect_right(self.groups, step, key=lambda item: item[0]) - 1
        return self.groups[place][1] if place >= 0 else None


class WriteSchedule:
    """Decisions about one run and one tracker. ``now``: of a monotonic clock."""

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._seen: dict[object, float] = {}
        self._named: set[tuple[int, str]] = set()

    def due(
        self, content: RunContent, written: Written, now: float, *, is_settled: bool = False
    ) -> NextWrites:
        """Return what is to be written now. ``is_settled``: nothing is waited for."""
        settle_s = 0.0 if is_settled else self._settle_s
        back_to = _rollback(content, written)
        done = back_to if back_to is not None else written.next
        steps, waits = self._due_steps(content, done, now, settle_s)
        seen = {note.key: self._since(note.key, now) for note in content.notes}
        fresh = [note for note in content.notes if note.key not in written.notes]
        notes = [note for note in fresh if now - seen[note.key] >= settle_s]
        late = [] if back_to is not None else self._late(content, written)
        return NextWrites(back_to, steps, notes, late, waits or len(notes) < len(fresh))

    def _since(self, item: object, now: float) -> float:
        return self._seen.setdefault(item, now)

    def _due_steps(
        self, content: RunContent, done: int | None, now: float, settle_s: float
    ) -> tuple[list[StepValues], bool]:
        expected = done if done is not None else content.start
        due: list[StepValues] = []
        for row in content.steps:
            if done is not None and row.step < done:
                continue
            place = bisect.bisect_right(content.parts, row.first, key=lambda part: part[0]) - 1
            is_next = expected is not None and content.parts[place][0] <= expected
            if not (is_next and row.is_complete) and now - self._since(row[:3], now) < settle_s:
                return due, True
            self._seen.pop(row[:3], None)
            due.append(row if done is None or row.first >= done else rest_of(row, done))
            expected = row.step + 1
        return due, False

    def _late(self, content: RunContent, written: Written) -> list[str]:
        """Return a sentence for each value that differs from what was written."""
        late: list[str] = []
        oldest = min(written.values, default=written.next)
        for row in content.steps:
            if row.first != row.step or FIRST in row.values or oldest is None or written.next is None:
                continue
            if not oldest <= row.step < written.next:
                continue
            known = written.values.get(row.step)
            if known is None:
                late += self._name(row.step, "", f"step {row.step} arrived too late")
            for name, value in _own(row.values) if known is not None else ():
                if known is not None and _differs(known.get(name), value):
                    late += self._name(
                        row.step, name, f"{name} of step {row.step} arrived too late: {value:.6g}"
                    )
        return late

    def _name(self, step: int, name: str, sentence: str) -> list[str]:
        """Return the sentence, but only once."""
        if (step, name) in self._named:
            return []
        self._named.add((step, name))
        return [sentence]


def _own(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return what the script logged."""
    return [(name, value) for name, value in values.items() if not name.startswith("run/")]


def _rollback(content: RunContent, written: Written) -> int | None:
    """Return the first step that was written for a group in which it does not count any more."""
    for row in content.steps:
        if written.next is None or row.step >= written.next:
            return None
        group = written.group_of(row.step)
        if group is not None and _is_dropped(row.step, group, row.group, content.group_starts):
            return row.first
    return None


def _is_dropped(step: int, group: int, newer: int, starts: Mapping[int, int]) -> bool:
    """Tell whether a step of one group does not count, because a newer group has it.

    A coarse row is named after the newest of its groups, in which its early steps were not trained again.
    """
    if group == newer:
        return False
    if group < 0 or newer < group or newer not in starts:
        return True
    return any(start <= step for number, start in starts.items() if group < number <= newer)


def _differs(known: float | None, value: float) -> bool:
    """Compare as float32, which is what records and trackers hold."""
    return known is None or struct.pack("<f", known) != struct.pack("<f", value)
