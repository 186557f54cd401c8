"""Runs of MLflow in a database or at a server, which are also what a restarted feeder reads.

All values of a step are in one request, which is one transaction. A request that is sent again changes
nothing: the database takes an equal value once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import RunError
from barnraise.core.files import discard, replace
from barnraise.integrations.trackers.folder import lock_folder
from barnraise.integrations.trackers.parts import (
    PROJECT,
    current_part,
    part_name,
    replacement_text,
    restricted_name,
)
from barnraise.integrations.trackers.rows import GROUP, RunContent, RunNote, StepValues
from barnraise.integrations.trackers.schedule import Written

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
try:
    from mlflow.entities import Metric, RunTag
    from mlflow.exceptions import MlflowException
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from mlflow.tracking import MlflowClient
    from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_PARAMS_TAGS_PER_BATCH
except ImportError as error:
    raise RunError(
        f"{error.name}, which MLflow needs, is not installed here",
        hint=f"Install it: {sys.executable} -m pip install mlflow",
    ) from error

_PART = "barnraise.part"
_REPLACED = "barnraise.replaced"
_EVENT = "event."
_NAME_CHARACTERS = r"\w\-. /"
_STATUS = {"failed": "FAILED", "stopped": "KILLED"}


class MlflowTracker:
    """Parts of one run in an experiment of MLflow. ``written``: content of the part that counts.

    ``place``: the address of a server or a database, or a folder for a database of SQLite.
    """

    def __init__(self, place: str, run: str) -> None:
        is_folder = "://" not in place
        folder = Path(place).absolute() if is_folder else state_directory(load_settings()) / "trackers"
        held = hashlib.sha256(place.encode()).hexdigest()[:16]
        self._lock = lock_folder(
            folder, f"feeder-{run}.lock" if is_folder else f"{held}-{run}.lock", "mlflow"
        )
        artifacts = (folder / "artifacts").as_uri() if is_folder else None
        self._run, self._place = run, place
        with _named_errors(place):
            uri = _database(folder) if is_folder else place
            self._client = MlflowClient(tracking_uri=uri)
            self._experiment = self._find_experiment(artifacts)
            self._part = current_part(self._is_replaced)
            self._id = self._find_run(self._part)
            self.written = self._read()

    @property
    def name(self) -> str:
        """Return the name of this kind of tracker."""
        return "mlflow"

    def go_back(self, step: int) -> None:
        """Begin a new part, and say so at the one before."""
        text = replacement_text(step, part_name(self._run, self._part + 1))
        with _named_errors(self._place):
            self._client.set_tag(self._id, "mlflow.note.content", text)
            self._client.set_tag(self._id, _REPLACED, str(step))
            self._part += 1
            self._id = self._find_run(self._part)
            self.written = self._read()

    def write(self, steps: Sequence[StepValues]) -> None:
        """Write steps, in order."""
        self._begin(steps[0].at)
        for rows in _batches(steps):
            metrics = [metric for row in rows for metric in _metrics(row)]
            with _named_errors(self._place):
                self._client.log_batch(self._id, metrics=metrics)
            for row in rows:
                self.written.add(row.step, row.group, row.values)

    def note(self, notes: Sequence[RunNote]) -> None:
        """Write events of the run as tags, numbered."""
        self._begin(notes[0].at)
        for begin in range(0, len(notes), MAX_PARAMS_TAGS_PER_BATCH):
            part = notes[begin : begin + MAX_PARAMS_TAGS_PER_BATCH]
            tags = []
            for note in part:
                text = note.text if note.step is None else f"step {note.step}: {note.text}"
                tags.append(RunTag(f"{_EVENT}{len(self.written.notes):05d}.{note.key}", text))
                self.written.notes.add(note.key)
            with _named_errors(self._place):
                self._client.log_batch(self._id, tags=tags)

    def end(self, content: RunContent) -> None:
        """Set the state and the time at which the run ended."""
        if self._id and content.ended_at is not None:
            status = _STATUS.get(content.state, "FINISHED")
            with _named_errors(self._place):
                self._client.set_terminated(self._id, status, int(content.ended_at * 1000))

    def close(self) -> None:
        """Let another feeder go on."""
        self._lock.release()

    def _find_experiment(self, artifacts: str | None) -> str:
        known = self._client.get_experiment_by_name(PROJECT)
        if known is None:
            return str(self._client.create_experiment(PROJECT, artifact_location=artifacts))
        return str(known.experiment_id)

    def _find_run(self, part: int) -> str:
        """Return the id of a part; empty if it has not begun."""
        wanted = f"tags.`{_PART}` = '{part_name(self._run, part)}'"
        runs = self._client.search_runs([self._experiment], wanted, order_by=["attributes.start_time"])
        return str(runs[0].info.run_id) if runs else ""

    def _is_replaced(self, part: int) -> bool:
        run = self._find_run(part)
        return bool(run) and _REPLACED in self._client.get_run(run).data.tags

    def _begin(self, at: float) -> None:
        """Make the run of MLflow, with the time of its first content."""
        if not self._id:
            name = part_name(self._run, self._part)
            with _named_errors(self._place):
                made = self._client.create_run(
                    self._experiment, start_time=int(at * 1000), tags={_PART: name}, run_name=name
                )
            self._id = str(made.info.run_id)

    def _read(self) -> Written:
        """Return what the part holds, without the values: those of a day would take long to read."""
        written = Written()
        if not self._id:
            return written
        history = self._client.get_metric_history(self._id, GROUP)
        for metric in sorted(history, key=lambda metric: int(metric.step)):
            written.add(int(metric.step), int(metric.value), {})
        written.values.clear()
        tags = self._client.get_run(self._id).data.tags
        written.notes.update(tag.rpartition(".")[2] for tag in tags if tag.startswith(_EVENT))
        return written


def _database(folder: Path) -> str:
    """Return the address of the database of a folder; make it if there is none.

    A kill while MLflow makes the tables leaves a database that it cannot use. So the name comes last.
    """
    path, draft = folder / "mlflow.db", folder / "mlflow.db.new"
    if not path.exists():
        for left in folder.glob(f"{draft.name}*"):
            discard(left)
        store = SqlAlchemyStore(_address(draft), (folder / "artifacts").as_uri())
        store.engine.dispose()
        replace(draft, path)
    return _address(path)


def _address(path: Path) -> str:
    return f"sqlite:///{path.as_posix()}"


@contextlib.contextmanager
def _named_errors(place: str) -> Iterator[None]:
    """Raise RunError for what MLflow reports; its client has tried again by then."""
    try:
        yield
    except MlflowException as error:
        raise RunError(
            f"MLflow at {place} does not do what was asked: {error.message}",
            hint="Start the same `barnraise track` again: it goes on where it stopped.",
        ) from error


def _metrics(row: StepValues) -> list[Any]:
    at = int(row.at * 1000)
    return [Metric(_key(name), value, at, row.step) for name, value in row.values.items()]


def _key(name: str) -> str:
    """Return a name that MLflow accepts. It takes no name that is a path such as ``../loss``."""
    safe = restricted_name(name, _NAME_CHARACTERS)
    is_path = safe.startswith("..") or not all(part.strip(".") for part in safe.split("/"))
    return restricted_name(f"{name}/", r"\w\- ") if is_path else safe


def _batches(steps: Sequence[StepValues]) -> Iterator[list[StepValues]]:
    """Return groups of whole steps that fit into one request each; a step has far fewer values."""
    batch: list[StepValues] = []
    count = 0
    for row in steps:
        if batch and count + len(row.values) > MAX_METRICS_PER_BATCH:
            yield batch
            batch, count = [], 0
        batch.append(row)
        count += len(row.values)
    if batch:
        yield batch
