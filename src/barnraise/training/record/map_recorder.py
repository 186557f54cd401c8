"""Recorder of the maps of a session that does not train: items are its steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from barnraise.history.entries import GroupStart, TrainingGoal
from barnraise.history.step_rows import StepRow
from barnraise.training.group.interface import GroupManager
from barnraise.training.record.entry_writer import EntryWriter, node_of
from barnraise.training.record.recorder import is_first_of_machine
from barnraise.training.record.sinks import RecordSink


class MapRecorder:
    """Rows of finished items; the items of a later map follow those of the earlier ones."""

    def __init__(self, make_sink: Callable[[], RecordSink | None], manager: GroupManager) -> None:
        self._writer = EntryWriter(make_sink)
        self._manager = manager
        self._before = self._total = 0  # items of earlier maps, and of this one
        self._finished = 0
        self._generation = -1
        self._last = time.perf_counter()

    def start(self, total: int) -> None:
        """Start a map with this number of items."""
        if not self._writer.has_started:
            self._writer.start(self._writer.close)
        self._before, self._total, self._finished = self._before + self._total, total, 0
        if is_first_of_machine(self._manager):
            self._writer.put(TrainingGoal(time.time(), self._before + total, counts="item"))

    def note(self, finished: int) -> None:
        """Queue a row for the items that were finished since the last one."""
        manager, at, now = self._manager, time.time(), time.perf_counter()
        is_writer = is_first_of_machine(manager)
        if manager.generation != self._generation:
            # A worker that died may have taken results with it.
            self._generation, self._finished = manager.generation, min(self._finished, finished)
            first = self._before + self._finished
            members = tuple(map(node_of, manager.machines()))
            if is_writer:
                group = GroupStart(at, manager.generation, first, members, "kept", manager.provisional)
                self._writer.put(group)
        count = finished - self._finished
        if count > 0:
            seconds, self._last = now - self._last, now
            first = self._before + self._finished
            self._finished = finished
            if is_writer:
                row = StepRow(manager.generation, first, count, at, seconds, count, (), manager.provisional)
                self._writer.put(row)
