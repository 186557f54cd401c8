"""Feeder: reads the record of a run again and again, and gives its trackers what is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from barnraise.core.errors import BarnraiseError, RunError
from barnraise.history.entries import Entry
from barnraise.integrations.trackers.rows import RunContent, RunNote, StepValues, run_content
from barnraise.integrations.trackers.schedule import SETTLE_S, WriteSchedule, Written

POLL_S = 2.0
_LOAD = 10  # a poll takes at most this part of the time

Logs = Sequence[Sequence[Entry]]


class Tracker(Protocol):
    """Tracker of one run that cannot change what was written, but can go back."""

    written: Written

    @property
    def name(self) -> str:
        """Return the name of this kind of tracker."""

    def go_back(self, step: int) -> None:
        """Drop a step and all after it."""

    def write(self, steps: Sequence[StepValues]) -> None:
        """Write steps, in order."""

    def note(self, notes: Sequence[RunNote]) -> None:
        """Write events of the run."""

    def close(self) -> None:
        """Close the files and let another feeder go on."""


def open_tracker(target: str, run: str) -> Tracker:
    """Return the tracker of a target such as ``tensorboard=FOLDER``; raise RunError if there is none."""
    kind, _, place = target.partition("=")
    if kind == "tensorboard" and place:
        from barnraise.integrations.trackers.tensorboard import TensorBoardTracker

        return TensorBoardTracker(Path(place), run)
    raise RunError(f"there is no tracker {target!r}", hint="Name a folder: --to tensorboard=FOLDER")


def feed(run: str, trackers: Sequence[Tracker], read: Callable[[], Logs], say: Callable[[str], None]) -> None:
    """Give the trackers all steps of a run until it has ended and all is written."""
    schedules = [WriteSchedule() for _ in trackers]
    failure = ""
    while True:
        began = time.monotonic()
        try:
            content = run_content(read(), run)
        except BarnraiseError as error:  # the agent restarts, or a log is replaced
            if error.message != failure:
                say(f"the record of run {run} cannot be read, and is tried again: {error.message}")
            failure = error.message
        else:
            failure = ""
            waits = [
                _give(content, tracker, schedule, say)
                for tracker, schedule in zip(trackers, schedules, strict=True)
            ]
            if content.has_ended and not any(waits):
                return
        time.sleep(max(POLL_S, _LOAD * (time.monotonic() - began)))


def _give(content: RunContent, tracker: Tracker, schedule: WriteSchedule, say: Callable[[str], None]) -> bool:
    """Write what is due; return True if something waits."""
    is_old = content.ended_at is not None and time.time() - content.ended_at > SETTLE_S
    due = schedule.due(content, tracker.written, time.monotonic(), is_settled=is_old)
    if due.back_to is not None:
        say(f"{tracker.name}: training went back to step {due.back_to}")
        tracker.go_back(due.back_to)
    if due.steps:
        tracker.write(due.steps)
    if due.notes:
        tracker.note(due.notes)
    for sentence in due.late:
        say(f"{tracker.name}: {sentence}")
    return due.waits
