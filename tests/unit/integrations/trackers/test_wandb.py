"""Offline runs of wandb as its own command shows them, also after the feeder was killed again and again."""

from __future__ import annotations

import json
import subprocess
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
)
from tests.unit.integrations.trackers.test_schedule import group, steps

wandb = pytest.importorskip("wandb", reason="wandb is not installed; its tests: bash .ci/run trackers")


def records(board: Path, part: str) -> list[dict[str, Any]]:
    """Return the records of all files of a part, as `wandb leet inspect` prints them.

    Its program is called directly: the command takes two seconds for a file, to import wandb.
    """
    command = [wandb.util.get_core_path(), "leet", "inspect", "--no-observability", "--json", "--run-file"]
    lines: list[bytes] = []
    for path in sorted(board.glob(f"wandb/offline-run-*/run-{part}.wandb")):
        words = [*command, str(path), str(path.parent.parent)]
        lines += subprocess.run(words, check=True, capture_output=True, timeout=60).stdout.splitlines()
    return [json.loads(line) for line in lines]


def shown(board: Path, part: str) -> Curves:
    """Return the curves of a part, by step; each row that wandb holds is in them."""
    curves: Curves = {}
    for record in records(board, part):
        row = record.get("history", {}).get("item", {})
        for name, value in row.items():
            curves.setdefault(name, []).append((row["_step"], value))
    return curves


def configuration(board: Path, part: str) -> dict[str, Any]:
    """Return the configuration of a part, as the last record of each name says it."""
    config: dict[str, Any] = {}
    for record in records(board, part):
        for holder in (record, record.get("run", {})):
            config.update(holder.get("config", {}).get("update", {}))
    return config


def texts(board: Path, part: str) -> list[str]:
    """Return the texts of the events, without their steps."""
    values = configuration(board, part)["events"].values()
    return sorted(text.split(": ", 1)[-1] if text.startswith("step ") else text for text in values)


def test_wandb_shows_the_record(tmp_path: Path) -> None:
    tracker = open_tracker(f"wandb={tmp_path}", "example")
    give(tracker, example_run())
    tracker.close()
    curves, expected = shown(tmp_path, "example"), recorded([example_run()])
    assert {name: curves[name] for name in expected} == expected
    assert curves["_timestamp"][0][1] < 1_790_001_000, "the time of a step is that of its commit"
    assert texts(tmp_path, "example") == events(example_run())


def test_rollback_begins_a_part_with_all_steps_that_count(tmp_path: Path) -> None:
    log = [group(1, 0), *steps(1, 0, 10)]
    tracker = open_tracker(f"wandb={tmp_path}", "back")
    give(tracker, log)
    tracker.close()
    counted = [*log, group(2, 6), *steps(2, 6, 2)]
    tracker = open_tracker(f"wandb={tmp_path}", "back")  # a new feeder finds what the other one wrote
    give(tracker, counted)
    give(tracker, counted)
    tracker.close()
    assert shown(tmp_path, "back.2")["loss"] == recorded([counted])["loss"]
    assert shown(tmp_path, "back")["loss"] == recorded([log])["loss"]
    replaced = configuration(tmp_path, "back")["replaced"]
    assert replaced == "training went back to step 6; back.2 has the steps that count"
    assert texts(tmp_path, "back.2") == events(counted)


def test_names_that_wandb_keeps_for_itself_are_replaced(tmp_path: Path) -> None:
    tracker = open_tracker(f"wandb={tmp_path}", "names")
    give(tracker, named("_step", "_timestamp", "x_loss", "a.b"))
    tracker.close()
    curves = shown(tmp_path, "names")
    values = [curves[name][0] for name in ("x__step", "x__timestamp", "x_x_loss", "a.b")]
    assert values == [(0, 0), (0, 1), (0, 2), (0, 3)]
    tracker = open_tracker(f"wandb={tmp_path}", "names")
    assert {"_step", "_timestamp", "x_loss", "a.b"} < set(tracker.written.values[2])
    tracker.close()


def test_one_feeder_at_a_time(tmp_path: Path) -> None:
    tracker = open_tracker(f"wandb={tmp_path}", "alone")
    with pytest.raises(RunError, match="another process feeds"):
        open_tracker(f"wandb={tmp_path}", "alone")
    tracker.close()


def test_service_that_still_writes_is_found(tmp_path: Path) -> None:
    from barnraise.integrations.trackers.wandb import file_writers

    tracker = open_tracker(f"wandb={tmp_path}", "open")
    give(tracker, named("loss"))
    [words] = file_writers(tmp_path, "open")
    assert "wandb-core" in words[1]
    assert list(file_writers(tmp_path, "ope")) == []
    tracker.close()
    open_tracker(f"wandb={tmp_path}", "open").close()  # it waits until the service has closed the file
    assert list(file_writers(tmp_path, "open")) == []


@pytest.mark.clocks
@pytest.mark.slow
def test_feeder_that_is_killed_writes_each_step_once(tmp_path: Path) -> None:
    board = tmp_path / "board"

    def held() -> int:
        return len(shown(board, RUN).get("loss", ()))

    entries = feed_with_kills(tmp_path / "state", f"wandb={board}", 2.0, held)
    curves, expected = shown(board, f"{RUN}.2"), recorded([entries])
    assert {name: curves[name] for name in expected} == expected
    replaced = shown(board, RUN)["loss"]
    assert [step for step, _ in replaced] == list(range(len(replaced)))
    assert len(replaced) > BACK_TO
    assert texts(board, f"{RUN}.2") == events(entries)
