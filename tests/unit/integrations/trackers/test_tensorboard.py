"""Event files as TensorBoard reads them, also after the feeder was killed again and again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from barnraise.core.errors import RunError
from barnraise.history.entries import Entry
from barnraise.integrations.trackers.feeder import open_tracker
from barnraise.integrations.trackers.tensorboard import TensorBoardTracker
from benchmarks.invented_run import RUN, example_run
from tests.unit.integrations.trackers.killed_feeder import feed_with_kills, give, recorded
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


@pytest.mark.clocks
@pytest.mark.slow
def test_feeder_that_is_killed_writes_each_step_once(tmp_path: Path) -> None:
    board = tmp_path / "board"

    def held() -> int:
        return len(shown(board / RUN).get("loss", ()))

    entries = feed_with_kills(tmp_path / "state", f"tensorboard={board}", 1.0, held)
    curves, expected = shown(board / RUN), recorded([entries])
    assert {name: curves[name] for name in expected} == expected
    assert len(texts(board / RUN)) == len(set(texts(board / RUN))) > 5
