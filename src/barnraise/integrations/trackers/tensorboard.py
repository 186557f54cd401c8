"""Event files of TensorBoard, which are also what a restarted feeder reads to see where it stopped.

A step is one record, so that a kill leaves it whole or not at all. Each feeder begins a file of its own.
Events of the run are texts in a folder of their own: a rollback must not remove them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from barnraise.core.errors import RunError
from barnraise.core.files import sync
from barnraise.integrations.trackers.folder import lock_folder
from barnraise.integrations.trackers.rows import GROUP, RunContent, RunNote, StepValues
from barnraise.integrations.trackers.schedule import Written

_PREFIX = "events.out.tfevents."
_NOTES = "events"
_NOTE_TAG = "event"

try:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter
except ImportError as error:
    raise RunError(
        f"{error.name}, which TensorBoard needs, is not installed here",
        hint=f"Install it: {sys.executable} -m pip install tensorboard",
    ) from error


class TensorBoardTracker:
    """Event files of one run below a folder. ``written``: what they hold."""

    def __init__(self, folder: Path, run: str) -> None:
        self.written = Written()
        steps, notes = folder / run, folder / run / _NOTES
        self._lock = lock_folder(steps, "barnraise.lock", "tensorboard")
        notes.mkdir(exist_ok=True)
        for event in _events(steps):
            self._read(event)
        self.written.notes.update(
            value.metadata.summary_description for event in _events(notes) for value in event.summary.value
        )
        self._notes_at = len(self.written.notes)
        self._steps = _EventFile(steps)
        self._note_file = _EventFile(notes)
        self._start_at(self.written.next or 0)

    @property
    def name(self) -> str:
        """Return the name of this kind of tracker."""
        return "tensorboard"

    def go_back(self, step: int) -> None:
        """Make TensorBoard drop a step and all after it."""
        self._start_at(step)
        self.written.go_back(step)

    def write(self, steps: Sequence[StepValues]) -> None:
        """Write steps, in order."""
        for row in steps:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.values.items()]
            self._steps.add(Event(wall_time=row.at, step=row.step, summary=Summary(value=values)))
            self.written.add(row.step, row.group, row.values)
        self._steps.flush()

    def note(self, notes: Sequence[RunNote]) -> None:
        """Write events of the run as texts."""
        for note in notes:
            text = note.text if note.step is None else f"step {note.step}: {note.text}"
            summary = Summary.FromString(text_pb(_NOTE_TAG, text, description=note.key).SerializeToString())
            self._note_file.add(Event(wall_time=note.at, step=self._notes_at, summary=summary))
            self._notes_at += 1
            self.written.notes.add(note.key)
        self._note_file.flush()

    def end(self, content: RunContent) -> None:
        """Do nothing: event files have no end."""

    def close(self) -> None:
        """Close the files and let another feeder go on."""
        self._steps.close()
        self._note_file.close()
        self._lock.release()

    def _start_at(self, step: int) -> None:
        """Write the record with which TensorBoard drops this step and all after it."""
        start = SessionLog(status=SessionLog.START)
        self._steps.add(Event(wall_time=time.time(), step=step, session_log=start))
        self._steps.flush()

    def _read(self, event: Any) -> None:
        if event.HasField("session_log"):
            self.written.go_back(event.step)
        elif event.HasField("summary"):
            values = {value.tag: value.simple_value for value in event.summary.value}
            self.written.add(event.step, int(values.get(GROUP, 0)), values)


class _EventFile:
    """New event file whose name comes after all others of its folder."""

    def __init__(self, folder: Path) -> None:
        seconds = [int(path.name.removeprefix(_PREFIX).split(".")[0]) for path in _files(folder)]
        number = max([int(time.time()), *(second + 1 for second in seconds)])
        self._file = (folder / f"{_PREFIX}{number:010d}.barnraise").open("xb")
        self._records = RecordWriter(self._file)
        self.add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
        sync(self._file.fileno())
        self._file.close()


def _files(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob(f"{_PREFIX}*") if path.is_file()]
    return sorted(path for path in paths if path.name.removeprefix(_PREFIX).split(".")[0].isdigit())


def _events(folder: Path) -> list[Any]:
    """Return the events of all files; a record that a kill has cut off is left out."""
    return [
        Event.FromString(record) for path in _files(folder) for record in RawEventFileLoader(str(path)).Load()
    ]
