"""Ctrl-C while a run is watched: each one counts, at any point of the view."""

from __future__ import annotations

import pytest

from barnraise.agent_client.cluster_requests import RequestDone
from barnraise.agent_client.run_requests import RunRow, StopRunRequest, WatchRequest, WatchResponse
from barnraise.cli.runs import run_view
from barnraise.core.errors import AgentError


def told(phase: str) -> WatchResponse:
    row = RunRow(
        run="r", title="", command=("t.py",), by="h0", at=0, phase=phase, generation=1, version=1,
        sentence="", machines=("h0",), left_out=(),
    )  # fmt: skip
    return WatchResponse(row=row, parts=(), workers=())


def test_second_control_c_counts_during_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stops: list[bool] = []

    def ask(question: StopRunRequest | WatchRequest, expected: type, **rest: object) -> object:
        if isinstance(question, StopRunRequest):
            stops.append(question.hard)
            if not question.hard:
                raise KeyboardInterrupt  # it has not answered yet
            return RequestDone("stopping")
        if not stops:
            raise KeyboardInterrupt
        return told("ended")

    monkeypatch.setattr(run_view, "ask", ask)
    assert run_view.watch("r", all_ranks=False, stops=True).phase == "ended"
    assert stops == [False, True]
    assert "killing it" in capsys.readouterr().err


def test_absent_agent_receives_stop_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def ask(question: StopRunRequest | WatchRequest, expected: type, **rest: object) -> object:
        nonlocal tries
        if isinstance(question, StopRunRequest):
            tries += 1
            if tries == 1:
                raise AgentError("the agent of this machine has stopped")
            return RequestDone("stopping")
        if not tries:
            raise KeyboardInterrupt
        return told("ended")

    monkeypatch.setattr(run_view, "ask", ask)
    monkeypatch.setattr(run_view.time, "sleep", lambda seconds: None)
    assert run_view.watch("r", all_ranks=False, stops=True).phase == "ended"
    assert tries == 2
