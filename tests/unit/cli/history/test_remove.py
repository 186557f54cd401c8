"""``barnraise runs remove`` names what it removes, and asks first."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from barnraise.agent_client.cluster_requests import RequestDone
from barnraise.agent_client.history.requests import HistoryRemoveRequest, KeptLog
from barnraise.cli.history import remove
from barnraise.cli.history.commands import runs_group


class FakeSource:
    def runs(self) -> dict[str, list[KeptLog]]:
        return {"train-k3f9": [KeptLog("train-k3f9", b"", 2048, 1.0)], "other": []}

    def find(self, text: str) -> str:
        return next(run for run in self.runs() if run.startswith(text))


@pytest.fixture
def requests_sent(monkeypatch: pytest.MonkeyPatch) -> list[HistoryRemoveRequest]:
    requests: list[HistoryRemoveRequest] = []

    def ask(request: HistoryRemoveRequest, expected: type[RequestDone]) -> RequestDone:
        requests.append(request)
        return RequestDone("")

    monkeypatch.setattr(remove, "HistorySource", FakeSource)
    monkeypatch.setattr(remove, "ask", ask)
    return requests


def test_named_records_are_removed(requests_sent: list[HistoryRemoveRequest]) -> None:
    result = CliRunner().invoke(runs_group, ["remove", "train", "oth", "train-k3", "--yes"])
    assert result.exit_code == 0
    assert requests_sent == [HistoryRemoveRequest(("train-k3f9", "other"))]
    assert "2 records (2 KiB here): train-k3f9 and other" in result.output


def test_json_names_what_was_removed(requests_sent: list[HistoryRemoveRequest]) -> None:
    result = CliRunner().invoke(runs_group, ["remove", "train", "--yes", "--json"])
    assert json.loads(result.output) == {"removed": ["train-k3f9"]}


def test_nothing_is_removed_without_a_confirmation(requests_sent: list[HistoryRemoveRequest]) -> None:
    result = CliRunner().invoke(runs_group, ["remove", "train"])
    assert result.exit_code != 0
    assert requests_sent == []
