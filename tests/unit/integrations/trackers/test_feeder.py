"""Feeder of trackers: it stops with the run, also if the record of the run has no end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from barnraise.display.row_view import with_end
from barnraise.history.entries import Entry
from barnraise.integrations.trackers.feeder import feed
from barnraise.integrations.trackers.rows import RunContent, RunNote, StepValues, run_content
from barnraise.integrations.trackers.schedule import Written
from benchmarks.invented_run import RUN, example_run
from tests.unit.integrations.trackers.test_schedule import group, steps


class KeptSteps:
    """Tracker that keeps everything in memory."""

    name = "memory"

    def __init__(self) -> None:
        self.written = Written()
        self.states: list[str] = []

    def go_back(self, step: int) -> None:
        """Drop a step and all after it."""
        self.written.go_back(step)

    def write(self, steps: Sequence[StepValues]) -> None:
        """Keep which steps were written."""
        for row in steps:
            self.written.add(row.step, row.group, row.values)

    def note(self, notes: Sequence[RunNote]) -> None:
        """Keep which events were written."""
        self.written.notes.update(note.key for note in notes)

    def end(self, content: RunContent) -> None:
        """Keep the state in which the run ended."""
        self.states.append(content.state)

    def close(self) -> None:
        """Close nothing: there is no file."""


def test_feeder_stops_at_the_last_entry_of_a_run_that_was_killed() -> None:
    tracker, logs = KeptSteps(), (example_run(300),)

    def read() -> Sequence[Sequence[Entry]]:
        return logs

    feed(RUN, [tracker], read, print, lambda view: with_end(view, None, time.time()))
    assert tracker.states == ["stopped"]
    assert tracker.written.next == 300


def test_steps_count_as_news_of_a_run() -> None:
    view = run_content([[group(1, 0), *steps(1, 0, 5)]], RUN).view
    assert view.newest_at == pytest.approx(100.4)
    assert view.step_s == pytest.approx(0.1)
