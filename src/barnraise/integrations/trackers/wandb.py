"""Offline runs of wandb in a local folder, which are also what a restarted feeder reads.

Each feeder begins a folder of its own with the same id, as wandb does when a run is resumed. wandb's service
writes the files; it outlives a killed feeder for a moment, so that the next one waits for its end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from barnraise.core.errors import RunError
from barnraise.integrations.trackers.folder import lock_folder
from barnraise.integrations.trackers.parts import PROJECT, current_part, part_name, replacement_text
from barnraise.integrations.trackers.rows import GROUP, RunContent, RunNote, StepValues
from barnraise.integrations.trackers.schedule import Written

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
# A service of our own: one that others have started would keep the files open after this process was killed.
os.environ.pop("WANDB_SERVICE", None)
try:
    import wandb
    from wandb.util import get_core_path
except ImportError as error:
    raise RunError(
        f"{error.name}, which wandb needs, is not installed here",
        hint=f"Install it: {sys.executable} -m pip install wandb",
    ) from error

_SERVICE_END_S = 60.0
_POLL_S = 0.1
_READ_S = 600.0
_REPLACED = "replaced"
_EVENTS = "events"
_STATES = {"failed": 1, "stopped": 130}
_OWN = "_"  # wandb keeps names that begin with it for itself
_PREFIX = "x_"
_SETTINGS = {
    "mode": "offline",
    "silent": True,
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandbTracker:
    """Parts of one run below a folder. ``written``: content of the part that counts."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder.resolve(), run
        self._lock = lock_folder(self._folder, f"feeder-{run}.lock", "wandb")
        _wait_for_service(self._folder, run)
        self._part = current_part(lambda part: _REPLACED in _config(self._records(part)))
        self._events: dict[str, str] = {}
        self.written = self._read()
        self._open: Any = None

    @property
    def name(self) -> str:
        """Return the name of this kind of tracker."""
        return "wandb"

    def go_back(self, step: int) -> None:
        """Begin a new part, and say so at the one before."""
        text = replacement_text(step, part_name(self._run, self._part + 1))
        self._running().config.update({_REPLACED: text}, allow_val_change=True)
        self._finish(0)
        self._part += 1
        self.written, self._events = Written(), {}

    def write(self, steps: Sequence[StepValues]) -> None:
        """Write steps, in order."""
        running = self._running()
        for row in steps:
            values = {_key(name): value for name, value in row.values.items()}
            running.log({**values, "_timestamp": row.at}, step=row.step, commit=True)
            self.written.add(row.step, row.group, row.values)

    def note(self, notes: Sequence[RunNote]) -> None:
        """Write events of the run into its configuration, numbered."""
        for note in notes:
            text = note.text if note.step is None else f"step {note.step}: {note.text}"
            self._events[f"{len(self._events):05d} {note.key}"] = text
            self.written.notes.add(note.key)
        self._running().config.update({_EVENTS: self._events}, allow_val_change=True)

    def end(self, content: RunContent) -> None:
        """Set the state in which the run ended."""
        self._finish(_STATES.get(content.state, 0))

    def close(self) -> None:
        """Finish the files and let another feeder go on."""
        self._finish(0)
        self._lock.release()

    def _running(self) -> Any:
        """Return the open run of wandb; begin a folder if there is none."""
        if self._open is None:
            try:
                self._open = self._begin(part_name(self._run, self._part), len(self._files(self._part)) + 1)
            except wandb.Error as error:
                raise RunError(
                    f"wandb cannot begin a run in {self._folder}: {error}",
                    hint="Start the same `barnraise track` again: it goes on where it stopped.",
                ) from error
        return self._open

    def _begin(self, part: str, number: int) -> Any:
        """Begin the next folder of a part."""
        return wandb.init(
            project=PROJECT,
            dir=str(self._folder),
            id=part,
            name=part,
            group=self._run,
            resume="allow",
            # All events again, in case that an upload replaces the configuration of a resumed run.
            config={"run": self._run, **({_EVENTS: self._events} if self._events else {})},
            settings=wandb.Settings(**_SETTINGS, x_sync_dir_suffix=str(number)),
        )

    def _finish(self, code: int) -> None:
        if self._open is not None:
            self._open.finish(exit_code=code)
            self._open = None

    def _files(self, part: int) -> list[Path]:
        """Return the files of a part, in the order in which they began."""
        return sorted(self._folder.glob(f"wandb/offline-run-*/run-{part_name(self._run, part)}.wandb"))

    def _records(self, part: int) -> list[Mapping[str, Any]]:
        return [record for path in self._files(part) for record in _inspect(path)]

    def _read(self) -> Written:
        """Return what the part holds, with its events."""
        written, records = Written(), self._records(self._part)
        rows = [record["history"]["item"] for record in records if "history" in record]
        for row in sorted(rows, key=lambda row: int(row["_step"])):
            values = {_name(key): float(value) for key, value in row.items() if not key.startswith(_OWN)}
            written.add(int(row["_step"]), int(values[GROUP]), values)
        self._events = dict(_config(records).get(_EVENTS, {}))
        written.notes.update(key.rpartition(" ")[2] for key in self._events)
        return written


def _key(name: str) -> str:
    """Return a name that wandb does not keep for itself."""
    return f"{_PREFIX}{name}" if name.startswith((_OWN, _PREFIX)) else name


def _name(key: str) -> str:
    return key.removeprefix(_PREFIX)


def _config(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the configuration that the records of a part make together."""
    config: dict[str, Any] = {}
    for record in records:
        made = record.get("config") or record.get("run", {}).get("config") or {}
        config.update(made.get("update", {}))
    return config


def _inspect(path: Path) -> Iterator[Mapping[str, Any]]:
    """Return the records of a file as wandb's own reader tells them; a cut one at the end is left out."""
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]
    command += ["--run-file", str(path), str(path.parent.parent)]
    try:
        answer = subprocess.run(
            command, check=True, capture_output=True, timeout=_READ_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(
            f"wandb cannot read its file {path}: {error}", hint="Try it: wandb leet inspect FILE"
        ) from error
    for line in answer.stdout.splitlines():
        yield msgspec.json.decode(line)


def _wait_for_service(folder: Path, run: str) -> None:
    """Wait until no service of a killed feeder has a file of the run open."""
    deadline = time.monotonic() + _SERVICE_END_S
    while writer := next(file_writers(folder, run), None):
        if time.monotonic() > deadline:
            raise RunError(
                f"the process {' '.join(writer)} of an earlier feeder still has a file of run {run} open",
                hint="End this process.",
            )
        time.sleep(_POLL_S)


def file_writers(folder: Path, run: str) -> Iterator[list[str]]:
    """Return the id and the command of each process of wandb that may write a file of the run."""
    for process in psutil.process_iter(["name"]):
        if not str(process.info["name"]).startswith("wandb-core"):
            continue
        try:
            # Readers do not count. Only Linux tells for what a file is open.
            paths = [Path(file.path) for file in process.open_files() if getattr(file, "mode", "") != "r"]
            words = [str(process.pid), *process.cmdline()]
        except psutil.Error:  # it has ended
            continue
        # Runs have no dot in their names; parts of this run have.
        names = [path.name for path in paths if path.suffix == ".wandb" and folder in path.parents]
        if "leet" not in words and any(name.split(".")[0] == f"run-{run}" for name in names):
            yield words
