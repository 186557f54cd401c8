"""The list that `clean` shows, and what it asks the agent to remove."""

from __future__ import annotations

import pytest

from barnraise.agent_client.cluster_requests import CleanRequest, CleanResponse, CleanRow
from barnraise.cli.runs import clean
from barnraise.core.errors import AgentError

LOST = "run train-8f3z can then no longer be resumed or exported from this machine"
FOUND = CleanResponse(
    rows=(
        CleanRow(kind="run", name="train-8f3z", bytes=300 << 20, why="it has ended", lost=LOST),
        CleanRow(kind="files", name="of no kept run", bytes=1 << 30, why="412 files in all"),
        CleanRow(kind="environment", name="0123456789abcdef", bytes=5, why="not used for 8 days"),
    ),
    kept=(CleanRow(kind="run", name="other-" + "x" * 40, bytes=1, why="it can be resumed"),),
)


class Agent:
    """Answers like an agent, and keeps the requests."""

    def __init__(self, response: CleanResponse) -> None:
        self.response, self.requests = response, list[CleanRequest]()

    def ask(self, request: CleanRequest, expected: type, **_: object) -> CleanResponse:
        self.requests.append(request)
        if request.agreed is None:
            return self.response
        rows = tuple(row for row in self.response.rows if row.kind != "environment")
        return CleanResponse(rows=rows, freed=3 << 20)


def typed(monkeypatch: pytest.MonkeyPatch, agent: Agent, **options: bool) -> int:
    monkeypatch.setattr(clean, "ask", agent.ask)
    monkeypatch.setenv("COLUMNS", "80")
    defaults = {"everything": False, "dry_run": False, "yes": False, "as_json": False}
    return clean.clean(run="", **(defaults | options))


def test_dry_run_shows_what_would_go_and_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = Agent(FOUND)
    assert typed(monkeypatch, agent, dry_run=True) == 0
    output = capsys.readouterr().out
    assert "R" + LOST[1:] in " ".join(output.split())
    assert "1 run will be kept: other-" in output
    assert "barnraise attach RUN" in output
    assert max(map(len, output.splitlines())) <= 80
    assert [request.agreed for request in agent.requests] == [None]


def test_nothing_is_removed_before_a_person_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(FOUND)
    with pytest.raises(AgentError) as caught:
        typed(monkeypatch, agent)
    assert "--yes" in str(caught.value)
    assert [request.agreed for request in agent.requests] == [None]


def test_only_what_was_shown_is_removed_and_freed_bytes_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = Agent(FOUND)
    assert typed(monkeypatch, agent, yes=True) == 0
    assert agent.requests[1].agreed == tuple(row.key for row in FOUND.rows)
    output = capsys.readouterr().out
    assert "Kept environment 0123456789abcdef, which is in use now." in output
    assert output.endswith("Freed 3 MiB.\n")


def test_nothing_to_remove_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = Agent(CleanResponse(rows=()))
    assert typed(monkeypatch, agent, yes=True) == 0
    assert "There is nothing to remove." in capsys.readouterr().out
    assert len(agent.requests) == 1
