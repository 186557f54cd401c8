"""Steps without a quorum are counted by the worker that trains them, and reported if they are dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from barnraise.agent_client.provisional import note_steps, settle_steps, take_dropped
from barnraise.agent_client.run_requests import RunRow, WatchResponse
from barnraise.cli.runs.run_view import RunOutput
from barnraise.runs.record import DroppedSteps


def test_dropped_steps_are_told_once(tmp_path: Path) -> None:
    settle_steps(tmp_path, counts=False)
    assert take_dropped(tmp_path) == 0, "there were none"
    note_steps(tmp_path, 106, 107)
    note_steps(tmp_path, 106, 120)
    assert take_dropped(tmp_path) == 0, "nothing was decided yet"
    settle_steps(tmp_path, counts=False)
    assert take_dropped(tmp_path) == 14
    assert take_dropped(tmp_path) == 0
    note_steps(tmp_path, 130, 140)
    settle_steps(tmp_path, counts=True)
    settle_steps(tmp_path, counts=False)
    assert take_dropped(tmp_path) == 0, "these count"


def test_unreadable_note_is_none(tmp_path: Path) -> None:
    for text in ("", "{}", '{"began": -1, "done": 2}', "\0" * 9):
        (tmp_path / "dropped").write_text(text)
        assert take_dropped(tmp_path) == 0


def test_dropped_steps_are_returned_once(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = DroppedSteps(14, 120).sentence("h1")
    assert sentence == ("h1 had trained 14 steps alone; they are dropped, training continues from step 120")
    assert DroppedSteps(1, 2).sentence("h1").startswith("h1 had trained 1 step alone; it is dropped")
    row = RunRow(
        run="r", title="", command=("t.py",), by="h0", at=0, phase="running", generation=1, version=1,
        sentence="", machines=("h0",), left_out=(),
    )  # fmt: skip
    view = RunOutput(all_ranks=False)
    for _ in range(2):
        view.print_heard(WatchResponse(row=row, parts=(), workers=(), notes=(sentence,)))
    assert capsys.readouterr().err.count(sentence) == 1
