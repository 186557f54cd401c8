"""Event files as TensorBoard reads them, also after the feeder was killed again and again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from barnraise.core.errors import RunError
from barnraise.history.columns import unpack_column
from barnraise.history.entries import Entry, LogHead, StepBatch, ValueBatch
from barnraise.history.log_file import RunLogWriter, log_path
from barnraise.history.merge import merge
from barnraise.integrations.trackers.feeder import open_tracker
from barnraise.integrations.trackers.rows import run_content
from barnraise.integrations.trackers.schedule import WriteSchedule
from barnraise.integrations.trackers.tensorboard import TensorBoardTracker
from benchmarks.invented_run import DESK, MAC, RUN, example_run
from tests.unit.integrations.trackers.test_schedule import group, steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves that TensorBoard shows."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(item.step, item.value) for item in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def texts(folder: Path) -> list[str]:
    reader = EventAccumulator(str(folder / "events"), size_guidance={"tensors": 0})
    reader.Reload()
    if "event" not in reader.Tags()["tensors"]:
        return []
    return [item.tensor_proto.string_val[0].decode() for item in reader.Tensors("event")]


def recorded(logs: list[list[Entry]]) -> dict[str, list[tuple[int, float]]]:
    """Return the logged values of the record, step by step."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for entry in merge(logs):
        if isinstance(entry, ValueBatch):
            for name, column in zip(entry.names, entry.columns, strict=True):
                values = enumerate(unpack_column(column))
                curves.setdefault(name, []).extend((entry.first + row, value) for row, value in values)
    return curves


def give(tracker: TensorBoardTracker, *logs: list[Entry]) -> None:
    due = WriteSchedule().due(run_content(logs, RUN), tracker.written, 0.0, is_settled=True)
    if due.back_to is not None:
        tracker.go_back(due.back_to)
    tracker.write(due.steps)
    tracker.note(due.notes)


def test_tensorboard_shows_the_record(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, RUN)
    give(tracker, example_run())
    tracker.close()
    curves = shown(tmp_path / RUN)
    expected = recorded([example_run()])
    assert {name: curves[name] for name in expected} == expected
    assert "step 320: mac died: its worker was killed by signal 9" in texts(tmp_path / RUN)


def test_rollback_removes_the_steps_that_do_not_count(tmp_path: Path) -> None:
    log: list[Entry] = [group(1, 0), *steps(1, 0, 10)]
    tracker = TensorBoardTracker(tmp_path, RUN)
    give(tracker, log)
    tracker.close()
    log += [group(2, 6), *steps(2, 6, 2)]
    tracker = TensorBoardTracker(tmp_path, RUN)  # a new feeder finds what the other one wrote
    give(tracker, log)
    give(tracker, log)
    tracker.close()
    assert shown(tmp_path / RUN)["loss"] == recorded([log])["loss"]
    assert len(texts(tmp_path / RUN)) == 1


def test_record_that_a_kill_cut_off_is_written_again(tmp_path: Path) -> None:
    log: list[Entry] = [group(1, 0), *steps(1, 0, 10)]
    tracker = TensorBoardTracker(tmp_path, RUN)
    give(tracker, log)
    tracker.close()
    [path] = (tmp_path / RUN).glob("events.out.tfevents.*")
    os.truncate(path, path.stat().st_size - 5)
    tracker = TensorBoardTracker(tmp_path, RUN)
    assert tracker.written.next == 9
    give(tracker, log)
    tracker.close()
    assert shown(tmp_path / RUN)["loss"] == recorded([log])["loss"]


def test_one_feeder_at_a_time(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, RUN)
    with pytest.raises(RunError, match="another process feeds"):
        open_tracker(f"tensorboard={tmp_path}", RUN)
    tracker.close()
    open_tracker(f"tensorboard={tmp_path}", RUN).close()


def until_files(folder: Path, count: int) -> None:
    """Wait until ``count`` feeders have begun a file."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob("events.out.tfevents.*"))) < count:
        assert time.monotonic() < deadline, "no feeder has begun a file"
        time.sleep(0.02)


@pytest.mark.clocks
@pytest.mark.slow
def test_feeder_that_is_killed_writes_each_step_once(tmp_path: Path) -> None:
    """Two logs grow and one comes late, while the real command is killed at random moments."""
    state, board = tmp_path / "state", tmp_path / "board"
    writers = {
        node: RunLogWriter(log_path(state, RUN, node), LogHead(RUN, node, "agent", bytes(16), 1.0))
        for node in (DESK, MAC)
    }
    entries = [entry for entry in example_run(600, rows=3) if not isinstance(entry, LogHead)]
    numbers = [entry for entry in entries if isinstance(entry, StepBatch | ValueBatch)]
    writers[DESK].append([entry for entry in entries if not isinstance(entry, StepBatch | ValueBatch)][:-1])
    noise, kills = random.Random(3), 0
    environment = {**os.environ, "BARNRAISE_STATE_DIRECTORY": str(state)}
    command = [sys.executable, "-c", "from barnraise.cli.main import main; main()", "track", RUN]
    command += ["--to", f"tensorboard={board}"]
    for start in range(0, len(numbers), 80):
        # The main worker moves: from the middle on, the other machine writes.
        writers[DESK if start < len(numbers) // 2 else MAC].append(numbers[start : start + 80])
        feeder = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        until_files(board / RUN, kills + 1)
        time.sleep(noise.uniform(0.0, 1.0))
        feeder.kill()
        output = feeder.communicate()[0].decode()
        assert feeder.returncode == -9, output
        kills += 1
    writers[MAC].append([entries[-1 - len(numbers)]])  # the end
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert kills >= 5
    curves, expected = shown(board / RUN), recorded([entries])
    assert {name: curves[name] for name in expected} == expected
    assert len(texts(board / RUN)) == len(set(texts(board / RUN))) > 5
