"""Project of Trackio as its own command shows it, also after the feeder was killed again and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from barnraise.core.errors import RunError
from barnraise.integrations.trackers.feeder import open_tracker
from benchmarks.invented_run import RUN, example_run
from tests.unit.integrations.trackers.killed_feeder import (
    BACK_TO,
    Curves,
    events,
    feed_with_kills,
    give,
    named,
    recorded,
    rows,
)
from tests.unit.integrations.trackers.test_schedule import group, steps

# Not imported here: Trackio takes its folder when it is imported.
pytestmark = pytest.mark.skipif(
    find_spec("trackio") is None, reason="trackio is not installed; its tests: bash .ci/run trackers"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the one folder that Trackio takes in this process; each test feeds a run of its own."""
    return tmp_path_factory.mktemp("board")


def trackio(folder: Path, *words: str) -> Any:
    command = [str(Path(sys.executable).with_name("trackio")), *words, "--project", "barnraise", "--json"]
    environment = {**os.environ, "TRACKIO_DIR": str(folder)}
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    return json.loads(answer.stdout)


def shown(folder: Path, part: str, *names: str) -> Curves:
    """Return curves that Trackio shows of a part, by step; it tells them by time."""
    curves: Curves = {}
    for name in names:
        rows = trackio(folder, "get", "metric", "--run", part, "--metric", name)["values"]
        curves[name] = sorted((row["step"], row["value"]) for row in rows)
    return curves


def alerts(folder: Path, part: str) -> list[str]:
    return [alert["text"] for alert in trackio(folder, "list", "alerts", "--run", part)["alerts"]]


def test_trackio_shows_the_record(folder: Path) -> None:
    tracker = open_tracker(f"trackio={folder}", "example")
    give(tracker, example_run())
    tracker.close()
    expected = recorded([example_run()])
    assert shown(folder, "example", *expected) == expected
    assert "mac died: its worker was killed by signal 9" in alerts(folder, "example")


def test_rollback_begins_a_part_with_all_steps_that_count(folder: Path) -> None:
    log = [group(1, 0), *steps(1, 0, 10)]
    tracker = open_tracker(f"trackio={folder}", "back")
    give(tracker, log)
    tracker.close()
    counted = [*log, group(2, 6), *steps(2, 6, 2)]
    tracker = open_tracker(f"trackio={folder}", "back")  # a new feeder finds what the other one wrote
    give(tracker, counted)
    give(tracker, counted)
    tracker.close()
    assert shown(folder, "back.2", "loss") == recorded([counted])
    assert shown(folder, "back", "loss") == recorded([log])
    assert alerts(folder, "back") == ["training went back to step 6; back.2 has the steps that count"]
    assert len(alerts(folder, "back.2")) == 1


def test_reserved_names_are_kept_apart(folder: Path) -> None:
    tracker = open_tracker(f"trackio={folder}", "names")
    give(tracker, named("step", "time", "__x"))
    tracker.close()
    names = trackio(folder, "list", "metrics", "--run", "names")["metrics"]
    assert {"__step", "__time", "____x"} <= set(names)


def test_one_feeder_at_a_time(folder: Path, tmp_path: Path) -> None:
    tracker = open_tracker(f"trackio={folder}", "alone")
    with pytest.raises(RunError, match="another process feeds"):
        open_tracker(f"trackio={folder}", "alone")
    tracker.close()
    with pytest.raises(RunError, match="one folder"):
        open_tracker(f"trackio={tmp_path}", "alone")


@pytest.mark.clocks
@pytest.mark.slow
def test_feeder_that_is_killed_writes_each_step_once(tmp_path: Path) -> None:
    board = tmp_path / "board"

    def held() -> int:
        return rows(board / "barnraise.db", "SELECT COUNT(*) FROM metrics")

    entries = feed_with_kills(tmp_path / "state", f"trackio={board}", 1.5, held)
    expected = recorded([entries])
    assert shown(board, f"{RUN}.2", *expected) == expected
    replaced = shown(board, RUN, "loss")["loss"]
    assert [step for step, _ in replaced] == list(range(len(replaced)))
    assert len(replaced) > BACK_TO
    assert sorted(alerts(board, f"{RUN}.2")) == events(entries)
