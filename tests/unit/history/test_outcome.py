"""A run ends in one state, which displays, notices and lists tell alike."""

from __future__ import annotations

import pytest

from barnraise.agent.history.run_events import change_entries
from barnraise.agent.notifications.changes import notices_of
from barnraise.agent_client.run_requests import RunRow
from barnraise.cli.runs.runs import _state
from barnraise.display.row_view import run_state
from barnraise.history.entries import RunEnd
from barnraise.history.outcome import end_state
from barnraise.history.view_builder import build_view
from tests.unit.agent.notifications.records import H0, H1, ended, facts, record


@pytest.mark.parametrize(
    ("code", "rank", "state", "word"),
    [
        (0, -1, "ended", "done"),
        (1, 0, "failed", "failed"),
        (3, 1, "failed", "failed"),  # the script's own code: a forgiven failure leaves 0
        (130, -1, "stopped", "stopped"),
        (130, 1, "failed", "failed"),  # the script's own code
        (137, 1, "failed", "failed"),
    ],
)
def test_all_tell_the_same_state(code: int, rank: int, state: str, word: str) -> None:
    before, after = record(H0, H1), ended(code, "a sentence", rank=rank)
    assert after.outcome is not None
    view = build_view(change_entries(before, after, {}, (), 9.0))
    assert view.state == state
    row = RunRow(
        run="train-k3f9", title="", command=("train.py",), by="h0", at=0, phase="ended", generation=1,
        version=9, sentence="a sentence", machines=("h0", "h1"), code=code,
        failed_rank=rank if rank >= 0 else None,
    )  # fmt: skip
    assert run_state(row) == state
    assert _state(row) == word
    events = [notice.event for notice in notices_of(before, after, facts())]
    assert events == {"ended": ["done"], "failed": ["failed"], "stopped": []}[state]


def test_end_in_a_log_of_an_earlier_version_is_told_by_its_code() -> None:
    assert end_state(130) == "stopped"
    assert build_view([RunEnd(5.0, 130)]).state == "stopped"
    assert build_view([RunEnd(5.0, 3)]).state == "failed"
