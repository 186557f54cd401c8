"""The verbs that change the cluster, and their questions."""

from __future__ import annotations

import sys

import click
import pytest

from barnraise.agent_client.cluster_requests import RequestDone, StatusResponse, UnpairRequest
from barnraise.cli.cluster import members
from barnraise.core.errors import MembershipError
from tests.unit.cli.cluster.test_status import cluster, machine

LATIN, CYRILLIC = "pc", "рс"  # the second has letters of another script, which look the same


def test_unpair_asks_with_the_id_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names look alike; the question and the request name the id of the one that was typed."""
    response = cluster(
        machine(LATIN, node="AAAA-BBBB-CCCC", short="AAAA-BBBB"),
        machine(CYRILLIC, node="DDDD-EEEE-FFFF", short="DDDD-EEEE"),
    )
    requests: list[object] = []

    def ask(request: object, expected: type, **_: object) -> object:
        requests.append(request)
        return response if expected is StatusResponse else RequestDone("removed")

    questions: list[str] = []
    monkeypatch.setattr(members, "ask", ask)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(click, "confirm", lambda text, abort: questions.append(text))
    assert members.unpair(node=CYRILLIC, yes=False, as_json=False) == 0
    assert questions == ["Remove рс (DDDD-EEEE) permanently? To return, it must leave and pair again."]
    assert requests[-1] == UnpairRequest("DDDD-EEEE-FFFF")
    with pytest.raises(MembershipError, match="no machine is called 'p'"):
        members.unpair(node="p", yes=False, as_json=False)
