"""The page of real agents: a run on it, other owners' machines, guests, and the end of the agent."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from barnraise.agent_client.cluster_requests import (
    JoinClusterRequest,
    LimitsRequest,
    LimitsResponse,
    OfferResponse,
    OpenPageRequest,
    OpenPageResponse,
    PairRequest,
    RenameRequest,
    RequestDone,
)
from barnraise.core.errors import BarnraiseError
from benchmarks.agents.local import LocalAgents


@pytest.fixture(scope="module")
def agents() -> Iterator[LocalAgents]:
    """Run two agents of owners, h0 and h1, and the guest h2."""
    with LocalAgents(3) as started:
        for place in range(3):
            started.start(place)
            started.ask(place, RenameRequest(f"h{place}"), RequestDone)
        for place, role in ((1, "owner"), (2, "guest")):
            code = started.ask(0, PairRequest(role), OfferResponse).code  # type: ignore[arg-type]
            join = JoinClusterRequest(code, at=f"127.0.0.1:{started.ports[0]}", patience_s=120.0)
            started.ask(place, join, RequestDone, 240.0)
        for place in range(3):
            started.until(lambda place=place: started.members(place) == 3, "all agree")  # type: ignore[misc]
        yield started


@contextlib.contextmanager
def opened(agents: LocalAgents, place: int, machine: str = "") -> Iterator[tuple[httpx.Client, str]]:
    """Open the page as `barnraise open` does; yield a client and the address of the machine's pages."""
    link = agents.ask(place, OpenPageRequest(machine), OpenPageResponse).link
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        text = client.get(link).raise_for_status().text
        address = re.search(r'href="(/[^"]+)/"', text)
        assert address is not None
        yield client, f"{link.split('/', 3)[0]}//{link.split('/', 3)[2]}{address[1]}"


def _token(client: httpx.Client, base: str) -> str:
    field = re.search(r'name="token" value="([^"]+)"', client.get(f"{base}/").text)
    assert field is not None
    return field[1]


def _place(agents: LocalAgents, number: int) -> str:
    """Return the place of an agent's machine in addresses of pages."""
    with opened(agents, number) as (_, base):
        return base.rpartition("/")[2]


def test_page_shows_a_run_with_its_output(agents: LocalAgents, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('the answer is 42')\n")
    done = agents.type(0, "run", "--on", "h0", "--env", "agent", "hello.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with opened(agents, 0) as (client, base):
        listed = client.get(f"{base}/").text
        run = re.search(r"/runs/(hello-[a-z0-9-]+)", listed)
        assert run is not None, listed
        shown = client.get(f"{base}/runs/{run[1]}").text
        assert "hello.py" in shown
        assert "h0" in shown
        assert "the answer is 42" in client.get(f"{base}/logs?run={run[1]}&words=ANSWER").text
        assert "quorum" in client.get(f"{base}/doctor").text


def test_owner_sees_and_pauses_other_machine(agents: LocalAgents) -> None:
    with opened(agents, 0, "h1") as (client, base):
        assert "Barnraise <span>h1</span>" in client.get(f"{base}/").text
        assert "quorum" in client.get(f"{base}/doctor").text
        origin = base.rsplit("/", 2)[0]
        form = {"token": _token(client, base)}
        for change, is_paused in (("pause", True), ("resume", False)):
            address = f"{base}/runs/any/machines/{_place(agents, 1)}/{change}"
            answer = client.post(address, data=form, headers={"origin": origin})
            assert answer.status_code == 303, answer.text
            assert agents.ask(1, LimitsRequest(), LimitsResponse).limits.paused is is_paused
        log = agents.type(1, "audit", folder=agents.root)
        assert "asked by owner" in log.stdout


def test_guest_is_not_asked_and_cannot_ask(agents: LocalAgents) -> None:
    with pytest.raises(BarnraiseError, match="only owners' machines"):
        agents.ask(0, OpenPageRequest("h2"), OpenPageResponse)
    with pytest.raises(BarnraiseError, match="only owners' machines"):
        agents.ask(2, OpenPageRequest("h0"), OpenPageResponse)
    with opened(agents, 0) as (client, base):
        origin = base.rsplit("/", 2)[0]
        form = {"token": _token(client, base)}
        address = f"{base}/runs/any/machines/{_place(agents, 2)}/pause"
        assert client.post(address, data=form, headers={"origin": origin}).status_code == 409
        assert not agents.ask(2, LimitsRequest(), LimitsResponse).limits.paused


def test_open_prints_a_link_and_cookies_end_with_the_agent(agents: LocalAgents) -> None:
    done = agents.type(1, "open", "--print", folder=agents.root)
    assert re.search(r"http://127\.0\.0\.1:\d+/\S+/open/\S+", done.stdout), done.stderr
    with opened(agents, 1) as (client, base):
        assert client.get(f"{base}/").status_code == 200
        agents.kill(1)
        agents.start(1)
        with opened(agents, 1) as (_, new_base):
            assert client.get(f"{new_base}/").status_code == 403
