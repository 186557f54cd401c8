"""Commands that change jobs."""

from __future__ import annotations

import pytest

from barnraise.agent_client.cluster_requests import RequestDone
from barnraise.cli.queue import change


def test_change_of_many_jobs_may_take_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []

    def ask(request: object, expected: object, timeout_s: float) -> RequestDone:
        limits.append(timeout_s)
        return RequestDone("cancelled")

    monkeypatch.setattr(change, "ask", ask)
    change.change("cancel", ["1"], as_json=False)
    change.change("cancel", ["1-1000"], as_json=False)
    change.change("pause", [], as_json=False)
    assert limits[0] < 130
    assert limits[1] >= 120 + 200, "a quorum agrees on each, perhaps over the internet"
    assert limits[2] == limits[1]
    assert capsys.readouterr().out == "cancelled\n" * 3
