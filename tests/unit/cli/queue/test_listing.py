"""The table of jobs on a terminal of 80 columns, and the best job."""

from __future__ import annotations

from typing import Any

import pytest

from barnraise.agent_client.queue.requests import JobRow, QueueResponse
from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.cli.queue import listing


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def row(job: int, **facts: Any) -> JobRow:
    values: dict[str, Any] = {
        "job": job, "state": "done", "by": "mac", "at": 0.0, "title": "train", "each": "device",
        "command": ("train.py", "--lr", f"{job}e-4"), "machines": ("pc",), "why": "finished successfully",
    }  # fmt: skip
    return JobRow(**(values | facts))


def loss(value: float) -> TrainingProgress:
    return TrainingProgress(1000, 1000, "loss", value)


def test_table_fits_and_names_the_best_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        row(1, progress=loss(0.5)),
        row(2, progress=loss(0.25)),
        row(3, progress=loss(float("nan"))),
        row(4, state="running", progress=loss(0.1), tries=2, why="started on pc"),
        row(5, state="waiting", is_paused=True, why="is paused"),
    )
    monkeypatch.setattr(listing, "ask", lambda question, expected: QueueResponse(jobs=rows))
    assert listing.show(everything=False, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["job", "state", "arguments", "machine", "step", "metric", "news"]
    assert "loss 0.250" in lines[2]
    assert "try 2: started" in lines[4]
    assert lines[5].split()[:2] == ["5", "paused"]
    assert lines[-1] == "Best of train: job 2, loss 0.250  --lr 2e-4"


def test_largest_value_is_best_if_asked_for() -> None:
    rows = [row(job, best="max", progress=loss(float(job))) for job in (1, 3, 2)]
    assert listing.best_lines(rows) == ["Best of train: job 3, loss 3.000  --lr 3e-4"]
    assert listing.best_lines(rows[:1]) == [], "one job is no comparison"


def test_empty_queue_and_missing_majority_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = QueueResponse(jobs=())
    monkeypatch.setattr(listing, "ask", lambda question, expected: answer)
    listing.show(everything=False, as_json=False)
    assert capsys.readouterr().out.startswith("The queue is empty.")
    answer = QueueResponse(jobs=(row(1),), sentence="waiting for pc")
    listing.show(everything=False, as_json=False)
    assert "No job starts now: waiting for pc" in capsys.readouterr().err
