"""Attacks on the page that an agent serves on loopback: by web pages, other users, the LAN and guests."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import psutil

from barnraise.agent_client.cluster_requests import (
    LimitsRequest,
    LimitsResponse,
    OpenPageRequest,
    OpenPageResponse,
)
from benchmarks.agents.machines import REPOSITORY
from benchmarks.attacks.registry import attack, undisturbed
from benchmarks.attacks.scenes.cluster import AttackedCluster
from benchmarks.attacks.scenes.runs import ALL_MACHINES, RunCluster

_WEB: Final = "web page"
_LOCAL: Final = "other local user"
_USER = 65534
_BY_IPV6 = "::ffff:127.0.0.1"  # the same address, by a socket of IPv6
_PARTS = re.compile(r"http://127\.0\.0\.1:(\d+)(/[^/]+)(/open/.+)")


@dataclass(frozen=True)
class OpenedPage:
    """Page of one machine with the cookie and the form token of its owner's browser."""

    cluster: AttackedCluster
    place: int
    port: int
    path: str
    pages: str
    cookie: str
    token: str

    def visit(
        self, *requests: dict[str, Any], user: int = -1, host: str = "127.0.0.1"
    ) -> list[tuple[str, str]]:
        """Send requests from the page's own machine; return status and text of the answers."""
        answers = _tool(
            self.cluster, self.place, "visit_page", port=self.port, requests=requests, user=user, host=host
        )
        assert answers["user"] == (user if user >= 0 else 0)
        return [(status, text) for status, text in answers["answers"]]

    def read(self, path: str, **headers: str) -> dict[str, Any]:
        """Return a request with the owner's cookie."""
        return {"method": "GET", "path": path, "headers": {"Cookie": self.cookie, **headers}}

    def change(self, path: str, body: str, **headers: str) -> dict[str, Any]:
        """Return a change with the owner's cookie."""
        usual = {"Cookie": self.cookie, "Content-Type": "application/x-www-form-urlencoded", **headers}
        return {"method": "POST", "path": path, "headers": usual, "body": body}

    @property
    def stop(self) -> str:
        """Return the address that stops the honest run."""
        return f"{self.pages}/runs/{self.cluster.bystanders.run}/stop"

    def is_open(self) -> bool:
        """Tell whether the owner's own browser sees the run."""
        ((status, text),) = self.visit(self.read(f"{self.pages}/"))
        return status == "200" and self.cluster.bystanders.run in text


def _tool(cluster: AttackedCluster, place: int, name: str, **arguments: Any) -> dict[str, Any]:
    """Run a tool of the attacker on a machine with an agent, in a process without the agent's files."""
    command = [sys.executable, "-P", "-m", "benchmarks.attacks.tools", name, json.dumps(arguments)]
    environment = cluster.machines.environment(place)
    host = cluster.machines.hosts[place]
    done = host.run(command, env=environment, cwd=REPOSITORY, timeout=120.0)
    return dict(json.loads(done.stdout))


def _link(cluster: AttackedCluster, place: int) -> tuple[int, str, str]:
    link = cluster.machines.ask(place, OpenPageRequest(), OpenPageResponse).link
    parts = _PARTS.fullmatch(link)
    assert parts is not None
    return int(parts[1]), parts[2], parts[3]


def _open(cluster: AttackedCluster, place: int = 0) -> OpenedPage:
    port, path, link = _link(cluster, place)
    request = {"method": "GET", "path": path + link}
    ((status, text),) = _tool(cluster, place, "visit_page", port=port, requests=[request])["answers"]
    cookie, pages = re.search(r"set-cookie: ([^;]+);", text), re.search(rf'href="({path}/[^/]+)/"', text)
    assert status == "200"
    assert cookie is not None
    assert pages is not None
    page = OpenedPage(cluster, place, port, path, pages[1], cookie[1], "")
    ((_, text),) = page.visit(page.read(f"{page.pages}/"))
    token = re.search(r'name="token" value="([^"]+)"', text)
    assert token is not None
    return OpenedPage(cluster, place, port, path, pages[1], cookie[1], token[1])


@contextlib.contextmanager
def _attacked(cluster: AttackedCluster) -> Iterator[OpenedPage]:
    """Open the page as its owner does; afterwards the owner still sees it, and no machine is paused."""
    page = _open(cluster)
    with cluster.unchanged():
        assert page.is_open(), "the owner's own request is no control"
        yield page
        assert page.is_open(), "the owner's session was closed"
        limits = cluster.machines.ask(0, LimitsRequest(), LimitsResponse).limits
        assert not limits.paused, "a machine was paused"


def _check_refused(page: OpenedPage, answers: list[tuple[str, str]], count: int) -> None:
    assert len(answers) == count, "not all was tried"
    for status, text in answers:
        assert status in (
            "none",
            "400",
            "403",
            "404",
            "405",
            "409",
            "411",
            "413",
            "414",
            "415",
            "421",
            "431",
        ), status
        assert page.cluster.bystanders.run not in text, "it read the list of runs"
        assert page.token not in text, "it read the token"


@attack("web-page-reads-runs", _WEB, "fetches, embeds and opens the page with its cookie", AttackedCluster)
def read_runs(cluster: AttackedCluster) -> str:
    with _attacked(cluster) as page:
        paths = (f"{page.pages}/", f"{page.pages}/updates", f"{page.path}/static/page.js")
        headers: list[dict[str, str]] = [
            {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
            {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"},
            {"Origin": "null"},
        ]
        requests = [page.read(path, **each) for path in paths for each in headers]
        answers = page.visit(*requests)
        _check_refused(page, answers, len(requests))
        assert all("access-control-allow" not in text.lower() for _, text in answers)
    return "rejected by Origin and Sec-Fetch-Site"


@attack("web-page-rebinds-name", _WEB, "lets its own name lead to loopback (DNS rebinding)", AttackedCluster)
def rebind_name(cluster: AttackedCluster) -> str:
    with _attacked(cluster) as page:
        names = ("evil.example", f"evil.example:{page.port}", "127.0.0.1.evil.example", "", "0.0.0.0")
        requests = [page.read(f"{page.pages}/", Host=name) for name in names]
        _check_refused(page, page.visit(*requests), len(names))
    return "rejected by Host"


@attack("web-page-posts-change", _WEB, "sends forms that stop a run and pause a machine", AttackedCluster)
def post_change(cluster: AttackedCluster) -> str:
    with _attacked(cluster) as page:
        node = cluster.nodes[0]
        own = f"http://127.0.0.1:{page.port}"
        good = f"token={page.token}"
        requests = []
        for path in (page.stop, f"{page.pages}/runs/x/machines/{node}/pause"):
            requests += [
                page.change(path, good, Origin="http://evil.example"),
                page.change(path, good, Origin="http://127.0.0.1:1"),
                page.change(path, good),
                page.change(path, good, Origin=own, **{"Sec-Fetch-Site": "cross-site"}),
                page.change(path, good, Origin=own, **{"Content-Type": "text/plain"}),
                page.change(path, "token=guess", Origin=own),
                page.change(path, "", Origin=own),
                page.read(path),
            ]
        _check_refused(page, page.visit(*requests), len(requests))
    return "rejected without the page's own origin and the session's token"


@attack("web-page-sends-too-much", _WEB, "sends long addresses, headers, forms and garbage", AttackedCluster)
def send_too_much(cluster: AttackedCluster) -> str:
    with _attacked(cluster) as page:
        own = f"http://127.0.0.1:{page.port}"
        requests = [
            page.read(f"{page.pages}/?{'a' * 9000}"),
            page.read(f"{page.pages}/", **{"X-Long": "a" * 60_000}),
            page.change(page.stop, "a" * 60_000, Origin=own),
            page.change(page.stop, "a", Origin=own, **{"Content-Length": "99999999999"}),
            page.change(page.stop, "a", Origin=own, **{"Content-Length": "-1"}),
            {"method": "GET\x00", "path": "/\x00", "headers": {}},
        ]
        _check_refused(page, page.visit(*requests), len(requests))
    return "rejected by size before it was read"


@attack("local-user-opens-page", _LOCAL, "uses the link in a command line, and a cookie", AttackedCluster)
def open_page(cluster: AttackedCluster) -> str:
    with _attacked(cluster) as page:
        _, path, link = _link(cluster, 0)
        requests = [
            {"method": "GET", "path": path + link},
            page.read(f"{page.pages}/"),
            {"method": "GET", "path": "/"},
        ]
        for host in ("127.0.0.1", _BY_IPV6):
            _check_refused(page, page.visit(*requests, user=_USER, host=host), len(requests))
        ((_, text),) = page.visit(page.read(f"{page.pages}/"), host=_BY_IPV6)
        assert cluster.bystanders.run in text, "the owner's own request by IPv6 is no control"
        ((status, _),) = page.visit({"method": "GET", "path": path + link})
        assert status == "200", "the link was used up"
    return "closed before a byte was read; the link was not used"


@attack("local-user-guesses-page", _LOCAL, "brings no cookie, or that of another agent", AttackedCluster)
def guess_page(cluster: AttackedCluster) -> str:
    other = _open(cluster, 1)
    with _attacked(cluster) as page:
        name = page.cookie.partition("=")[0]
        foreign = other.cookie.partition("=")[2]
        cookies = ("", other.cookie, f"{name}={foreign}", f"{name}=", f"{name}={'A' * 43}")
        paths = (f"{page.pages}/", f"{page.path}/static/page.css", f"{page.path}/open/{'A' * 43}", "/")
        requests = [page.read(path, Cookie=cookie) for path in paths for cookie in cookies]
        _check_refused(page, page.visit(*requests), len(requests))
    return "told only that the page is its owner's"


@attack("local-user-uses-link-again", _LOCAL, "uses a link that was used before", AttackedCluster)
def use_link_again(cluster: AttackedCluster) -> str:
    with _attacked(cluster) as page:
        _, path, link = _link(cluster, 0)
        ask = {"method": "GET", "path": path + link}
        (first, text), (second, refused) = page.visit(ask, ask)
        assert (first, second) == ("200", "403")
        assert "set-cookie" not in refused.lower()
        stolen = re.search(r"set-cookie: ([^;]+);", text)
        assert stolen is not None
        ((status, _),) = page.visit(page.read(f"{page.pages}/", Cookie=stolen[1]))
        assert status == "403", "both have a session"
    return "refused, and the session of the first use was closed"


@attack("local-user-holds-connections", _LOCAL, "holds 300 slow connections to the page", AttackedCluster)
def hold_connections(cluster: AttackedCluster) -> str:
    with _attacked(cluster) as page:
        agent = psutil.Process(cluster.machines.process(0).pid)
        before = agent.num_fds()
        words = "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        held = _tool(
            cluster, 0, "flood_page", port=page.port, count=300, words=words, seconds=4.0, user=_USER
        )
        assert held["opened"] >= 200, "the attempt was not made"
        assert held["held"] == 0, f"{held['held']} connections were held"
        undisturbed(agent.num_fds() <= before + 24, "the agent holds their connections")
    return "each closed at once; the owner's page was answered"


@attack("lan-reaches-page", "person on the LAN", "connects to the page's port from outside", AttackedCluster)
def reach_page(cluster: AttackedCluster) -> str:
    with _attacked(cluster) as page:
        requests = [page.read(f"{page.pages}/"), {"method": "GET", "path": "/"}]
        answers = cluster.attack("visit_page", port=page.port, host=cluster.addresses[0], requests=requests)
        assert [status for status, _ in answers["answers"]] == ["none", "none"], "it got an answer"
    return "no connection: the page listens on loopback only"


@attack("guest-asks-as-owner", "guest", "sends an owner's requests to read and stop runs", RunCluster)
def ask_as_owner(cluster: RunCluster) -> str:
    with cluster.unchanged():
        answers = cluster.attack(
            "guest_asks_as_owner", keep=cluster.guest, agents=cluster.agents, run=cluster.run
        )
        assert answers["sent"] >= 3 * len(cluster.agents), "not all was tried"
        assert answers["told"] == 0, "it was answered"
        assert cluster.phase(cluster.run) == "running"
    return "its connection was closed without an answer"


@attack("guest-pauses-others", "guest", "orders owners' machines to pause, in each way there is", RunCluster)
def pause_others(cluster: RunCluster) -> str:
    with cluster.unchanged():
        answers = cluster.attack("guest_pauses_others", keep=cluster.guest, agents=cluster.agents)
        assert answers["sent"] == 5 * len(cluster.agents), "not all was tried"
        assert answers["told"] == 0, "it was answered"
        assert answers["cut"] == 4 * len(cluster.agents), "a link stayed open after an order"
        for place in ALL_MACHINES:
            limits = cluster.machines.ask(place, LimitsRequest(), LimitsResponse).limits
            assert not limits.paused, f"machine {place} was paused"
        assert cluster.phase(cluster.run) == "running"
    return "no machine was paused, and no order was answered"
