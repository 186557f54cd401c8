"""Runs of MLflow as its client shows them, also after the feeder was killed again and again."""

from __future__ import annotations

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

mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed; its tests: bash .ci/run trackers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one database, which takes ten seconds to make."""
    return tmp_path_factory.mktemp("board")


def client(folder: Path) -> Any:
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")


def part_of(folder: Path, name: str) -> Any:
    """Return the one run of MLflow with a name."""
    [experiment] = client(folder).search_experiments(filter_string="name = 'barnraise'")
    [run] = client(folder).search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    return run


def shown(folder: Path, part: str) -> Curves:
    """Return the curves of a part, by step; each value that MLflow holds is in them."""
    run = part_of(folder, part)
    return {
        name: sorted(
            (metric.step, metric.value) for metric in client(folder).get_metric_history(run.info.run_id, name)
        )
        for name in run.data.metrics
    }


def texts(folder: Path, part: str) -> list[str]:
    """Return the texts of the events, without their steps."""
    tags = sorted(part_of(folder, part).data.tags.items())
    return sorted(
        text.split(": ", 1)[-1] if text.startswith("step ") else text
        for tag, text in tags
        if tag.startswith("event.")
    )


def test_mlflow_shows_the_record(folder: Path) -> None:
    tracker = open_tracker(f"mlflow={folder}", "example")
    give(tracker, example_run())
    tracker.close()
    curves, expected = shown(folder, "example"), recorded([example_run()])
    assert {name: curves[name] for name in expected} == expected
    assert texts(folder, "example") == events(example_run())


def test_rollback_begins_a_part_with_all_steps_that_count(folder: Path) -> None:
    log = [group(1, 0), *steps(1, 0, 10)]
    tracker = open_tracker(f"mlflow={folder}", "back")
    give(tracker, log)
    tracker.close()
    counted = [*log, group(2, 6), *steps(2, 6, 2)]
    tracker = open_tracker(f"mlflow={folder}", "back")  # a new feeder finds what the other one wrote
    give(tracker, counted)
    give(tracker, counted)
    tracker.close()
    assert shown(folder, "back.2")["loss"] == recorded([counted])["loss"]
    assert shown(folder, "back")["loss"] == recorded([log])["loss"]
    tags = part_of(folder, "back").data.tags
    assert tags["mlflow.note.content"] == "training went back to step 6; back.2 has the steps that count"
    assert texts(folder, "back.2") == events(counted)


def test_names_that_mlflow_does_not_take_are_replaced(folder: Path) -> None:
    names = ("acc@5", "acc#5", "../loss", "a//b", "é:1", "..", "val/loss")
    tracker = open_tracker(f"mlflow={folder}", "names")
    give(tracker, named(*names))
    tracker.close()
    curves = {name: curve for name, curve in shown(folder, "names").items() if not name.startswith("run/")}
    assert "val/loss" in curves
    assert sorted(value for curve in curves.values() for _, value in curve) == [
        float(number) for number in range(len(names)) for _ in range(3)
    ]


def test_one_feeder_at_a_time(folder: Path) -> None:
    tracker = open_tracker(f"mlflow={folder}", "alone")
    with pytest.raises(RunError, match="another process feeds"):
        open_tracker(f"mlflow={folder}", "alone")
    tracker.close()


@pytest.mark.clocks
@pytest.mark.slow
def test_feeder_that_is_killed_writes_each_step_once(tmp_path: Path) -> None:
    board = tmp_path / "board"

    def held() -> int:
        return rows(board / "mlflow.db", "SELECT COUNT(*) FROM metrics WHERE key = 'loss'")

    entries = feed_with_kills(tmp_path / "state", f"mlflow={board}", 2.0, held)
    curves, expected = shown(board, f"{RUN}.2"), recorded([entries])
    assert {name: curves[name] for name in expected} == expected
    replaced = shown(board, RUN)["loss"]
    assert [step for step, _ in replaced] == list(range(len(replaced)))
    assert len(replaced) > BACK_TO
    assert texts(board, f"{RUN}.2") == events(entries)
    assert part_of(board, f"{RUN}.2").info.status == "FINISHED"
