"""`ps` with long commands and sentences on a terminal of 80 columns."""

from __future__ import annotations

import time

import pytest

from barnraise.agent_client.run_requests import PartRow, RunRow, RunsResponse, WatchResponse, WorkerRow
from barnraise.cli.runs import runs

SENTENCE = "nas disappeared; training continues on 2 machines, which are mac and the computer in the attic"


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def row(**facts: object) -> RunRow:
    values: dict[str, object] = {
        "run": "train-8f3z", "title": "",
        "command": ("train.py", "--learning-rate", "0.001", "--epochs", "90"),
        "by": "mac", "at": time.time() - 3600, "phase": "running", "generation": 1, "version": 1,
        "sentence": SENTENCE, "machines": ("mac", "pc"),
    }  # fmt: skip
    return RunRow(**(values | facts))  # type: ignore[arg-type]


def test_list_of_runs_with_long_texts_fits_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = RunsResponse((row(), row(run="a-very-long-name-of-a-run-" + "x" * 60, command=("t.py",))))
    monkeypatch.setattr(runs, "ask", lambda question, expected: listed)
    assert runs.ps(run=None, everything=False, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["run", "state", "began", "machines", "command", "news"]


def test_one_run_is_shown_with_its_whole_sentences() -> None:
    workers = (
        WorkerRow(rank=0, name="the-computer-in-the-attic", device="cuda:0", state="running", words=SENTENCE),
    )
    parts = (PartRow(name="pc", stage="waiting", words=SENTENCE),)
    for response in (
        WatchResponse(row=row(left_out=(("old", SENTENCE),)), parts=(), workers=workers),
        WatchResponse(row=row(), parts=parts, workers=(), findings=(SENTENCE,)),
    ):
        text = runs.describe(response)
        assert max(map(len, text.splitlines())) <= 80
        for word in SENTENCE.split():
            assert text.count(word) >= 2
