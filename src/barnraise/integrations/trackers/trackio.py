"""Project of Trackio in a local folder; its database is what a restarted feeder reads.

Many steps are one transaction, and each event has a key of its own, so that a kill leaves each once or not at
all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from barnraise.core.errors import RunError
from barnraise.integrations.trackers.folder import lock_folder
from barnraise.integrations.trackers.parts import PROJECT, current_part, part_name, replacement_text
from barnraise.integrations.trackers.rows import GROUP, RunContent, RunNote, StepValues
from barnraise.integrations.trackers.schedule import Written

_REPLACED = "replaced"
_EVENT = "event"
_ROWS = 2000  # of one transaction


class TrackioTracker:
    """Parts of one run in the project of a folder. ``written``: content of the part that counts."""

    def __init__(self, folder: Path, run: str) -> None:
        folder = folder.absolute()
        self._storage, self._reserved = _trackio(folder)
        self._lock = lock_folder(folder, f"feeder-{run}.lock", "trackio")
        self._run = run
        self._part = current_part(self._is_replaced)
        self.written = self._read()

    @property
    def name(self) -> str:
        """Return the name of this kind of tracker."""
        return "trackio"

    def go_back(self, step: int) -> None:
        """Begin a new part, and say so at the one before."""
        text = replacement_text(step, part_name(self._run, self._part + 1))
        self._alert(_REPLACED, [(_REPLACED, step, text, datetime.now(UTC).isoformat())])
        self._part += 1
        self.written = self._read()

    def write(self, steps: Sequence[StepValues]) -> None:
        """Write steps, in order."""
        for begin in range(0, len(steps), _ROWS):
            rows = steps[begin : begin + _ROWS]
            self._storage.bulk_log(
                project=PROJECT,
                run=self._name,
                metrics_list=[self._metrics(row) for row in rows],
                steps=[row.step for row in rows],
                timestamps=[_time(row.at) for row in rows],
                log_ids=[f"{self._name} {row.step}" for row in rows],
                config={"run": self._run},
            )
            for row in rows:
                self.written.add(row.step, row.group, row.values)

    def note(self, notes: Sequence[RunNote]) -> None:
        """Write events of the run as alerts."""
        self._alert(_EVENT, [(note.key, note.step, note.text, _time(note.at)) for note in notes])
        self.written.notes.update(note.key for note in notes)

    def end(self, content: RunContent) -> None:
        """Do nothing: a run of Trackio has no end."""

    def close(self) -> None:
        """Let another feeder go on."""
        self._lock.release()

    @property
    def _name(self) -> str:
        return part_name(self._run, self._part)

    def _metrics(self, row: StepValues) -> dict[str, float]:
        # Trackio itself renames reserved names in this way.
        return {
            f"__{name}" if name in self._reserved or name.startswith("__") else name: value
            for name, value in row.values.items()
        }

    def _alert(self, title: str, alerts: Sequence[tuple[str, int | None, str, str]]) -> None:
        keys, steps, texts, times = map(list, zip(*alerts, strict=True))
        self._storage.bulk_alert(
            project=PROJECT,
            run=self._name,
            titles=[title] * len(alerts),
            texts=texts,
            levels=["info"] * len(alerts),
            steps=steps,
            timestamps=times,
            alert_ids=[f"{self._name} {key}" for key in keys],
        )

    def _is_replaced(self, number: int) -> bool:
        alerts = self._storage.get_alerts(PROJECT, run_name=part_name(self._run, number))
        return any(alert["title"] == _REPLACED for alert in alerts)

    def _read(self) -> Written:
        """Return what the part holds. Events are left out: one that is written again stays once."""
        written = Written()
        rows = self._storage.get_logs(PROJECT, self._name)
        for row in sorted(rows, key=lambda row: int(row["step"])):
            values = {
                name.removeprefix("__"): value for name, value in row.items() if isinstance(value, float)
            }
            written.add(int(row["step"]), int(values[GROUP]), values)
        return written


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _trackio(folder: Path) -> tuple[Any, frozenset[str]]:
    """Import Trackio with a folder; return its storage and the names that it reserves."""
    os.environ["TRACKIO_DIR"] = str(folder)
    try:
        from trackio import utils
        from trackio.sqlite_storage import SQLiteStorage
    except ImportError as error:
        raise RunError(
            f"{error.name}, which Trackio needs, is not installed here",
            hint=f"Install it: {sys.executable} -m pip install trackio",
        ) from error
    if folder != utils.TRACKIO_DIR:
        raise RunError(
            "one command feeds one folder of Trackio", hint="Start another `barnraise track` for the other."
        )
    return SQLiteStorage, frozenset(utils.RESERVED_KEYS)
