"""Feeder: reads the record of a run again and again, and gives its trackers what is due."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from barnraise.core.errors import BarnraiseError, RunError
from barnraise.history.entries import Entry
from barnraise.history.view import RunView
from barnraise.integrations.trackers.rows import RunContent, RunNote, StepValues, run_content
from barnraise.integrations.trackers.schedule import SETTLE_S, WriteSchedule, Written

POLL_S = 2.0
_LOAD = 10  # a poll takes at most this part of the time
_KINDS = "tensorboard=FOLDER, wandb=FOLDER, trackio=FOLDER, mlflow=ADDRESS"

Logs = Sequence[Sequence[Entry]]


class Tracker(Protocol):
    """Tracker of one run that cannot change what was written, but can go back.

    ``written``: what it holds; after `go_back` this may be less than the steps before, even nothing.
    """

    written: Written

    @property
    def name(self) -> str:
        """Return the name of this kind of tracker."""

    def go_back(self, step: int) -> None:
        """Drop a step and all after it, or begin a new part that holds nothing yet."""

    def write(self, steps: Sequence[StepValues]) -> None:
        """Write steps, in order."""

    def note(self, notes: Sequence[RunNote]) -> None:
        """Write events of the run."""

    def end(self, content: RunContent) -> None:
        """Write that the run has ended."""

    def close(self) -> None:
        """Close the files and let another feeder go on."""


def open_tracker(target: str, run: str) -> Tracker:
    """Return the tracker of a target such as ``tensorboard=FOLDER``; raise RunError if there is none."""
    kind, _, place = target.partition("=")
    match kind if place else "":
        case "tensorboard":
            from barnraise.integrations.trackers.tensorboard import TensorBoardTracker

            return TensorBoardTracker(Path(place), run)
        case "trackio":
            from barnraise.integrations.trackers.trackio import TrackioTracker

            return TrackioTracker(Path(place), run)
        case "mlflow":
            from barnraise.integrations.trackers.mlflow import MlflowTracker

            return MlflowTracker(place, run)
        case "wandb":
            from barnraise.integrations.trackers.wandb import WandbTracker

            return WandbTracker(Path(place), run)
    raise RunError(f"there is no tracker {target!r}", hint=f"Name one of {_KINDS}.")


def feed(
    run: str,
    trackers: Sequence[Tracker],
    read: Callable[[], Logs],
    say: Callable[[str], None],
    with_end: Callable[[RunView], RunView] = lambda view: view,
) -> None:
    """Give the trackers all steps of a run until it has ended and all is written.

    ``with_end``: returns a view with the end of a run whose record has none.
    """
    schedules = [WriteSchedule() for _ in trackers]
    logs: Logs = ()
    content = run_content(logs, run)
    failure = ""
    while True:
        began = time.monotonic()
        try:
            newest = read()
            if not _is_same(newest, logs):
                content, logs = run_content(newest, run), newest
            content = content._replace(view=with_end(content.view))
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
                for tracker in trackers:
                    tracker.end(content)
                return
        time.sleep(max(POLL_S, _LOAD * (time.monotonic() - began)))


def _is_same(logs: Logs, others: Logs) -> bool:
    """Compare the logs as objects: a source gives the same one again if nothing was added."""
    return len(logs) == len(others) and all(map(operator.is_, logs, others))


def _give(content: RunContent, tracker: Tracker, schedule: WriteSchedule, say: Callable[[str], None]) -> bool:
    """Write what is due; return True if something waits."""
    is_old = content.ended_at is not None and time.time() - content.ended_at > SETTLE_S
    due = schedule.due(content, tracker.written, time.monotonic(), is_settled=is_old)
    if due.back_to is not None:
        say(f"{tracker.name}: training went back to step {due.back_to}")
        tracker.go_back(due.back_to)
        # A new part of a tracker gets all steps and events again.
        due = schedule.due(content, tracker.written, time.monotonic(), is_settled=is_old)
    if due.steps:
        tracker.write(due.steps)
    if due.notes:
        tracker.note(due.notes)
    for sentence in due.late:
        say(f"{tracker.name}: {sentence}")
    return due.waits
