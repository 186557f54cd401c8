"""Guard against web pages: a page that is open on the hub's machine reads nothing of a hub behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from barnraise.core.errors import HubRefused
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.messages import Problem, RunDescription, decode_message
from barnraise.hub.protocol.signatures import PROXY_HEADER
from barnraise.hub.server.host_guard import BROWSER_HEADERS, KnownHosts, ProxyRule, hosts_of, refusal_of
from barnraise.hub.storage.addresses import add_addresses, all_addresses, known_addresses, write_addresses
from barnraise.identity import NodeKey
from tests.unit.hub.hub_process import HubProcess, plainly

TOKEN = "a-token-of-the-proxy"
RULE = ProxyRule(hosts_of(["https://Hub.example.org/kQ3v9mXwTz7b", "http://[fd00::7]:52480"]))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:52480",
        "localhost",
        "LOCALHOST:1",
        "[::1]:52480",
        "127.8.8.8",
        "hub.example.org",
        "hub.example.org.:443",
        "HUB.example.org",
        "[fd00::7]",
    ],
)
def test_names_of_hub_and_machine_are_accepted(host: str) -> None:
    assert refusal_of(Headers({"host": host}), RULE) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:52480",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        ":52480",
        "hub.example.org@evil.example",
        "[::1",
        "0.0.0.0",
        "xhub.example.org",
        "",
        "127.0.0.1 evil",
    ],
)
def test_other_names_are_rejected(host: str) -> None:
    refusal = refusal_of(Headers({"host": host}), RULE)
    assert refusal is not None
    assert (refusal.status, refusal.kind) == (421, "host")
    assert "--address" in refusal.hint


def test_request_without_one_host_is_rejected() -> None:
    assert refusal_of(Headers({}), RULE) is not None
    twice = Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")])
    assert refusal_of(twice, RULE) is not None


@pytest.mark.parametrize("given", [None, "", "another", TOKEN[:-1], f"{TOKEN}x", "\xff"])
def test_rule_with_token_rejects_requests_without_it(given: str | None) -> None:
    rule = ProxyRule(RULE.hosts, TOKEN)
    headers = {"host": "localhost"} | ({} if given is None else {PROXY_HEADER: given})
    refusal = refusal_of(Headers(headers), rule)
    assert refusal is not None
    assert (refusal.status, refusal.kind) == (403, "proxy")
    assert TOKEN not in f"{refusal.message} {refusal.hint}"
    assert refusal_of(Headers({"host": "any.example", PROXY_HEADER: TOKEN}), rule) is None


def test_new_addresses_are_read_while_hub_runs(tmp_path: Path) -> None:
    write_addresses(tmp_path, ["https://first.example"])
    clock = [0.0]
    hosts = KnownHosts(lambda: all_addresses(tmp_path), lambda: clock[0])
    add_addresses(tmp_path, ["https://second.example:8443/path", "https://first.example"])
    assert "second.example" not in hosts("second.example"), "not at every request"
    clock[0] = 2.0
    assert hosts("second.example") == {"first.example", "second.example"}
    assert known_addresses(tmp_path) == ("https://first.example",), "new invites name the same as before"


@pytest.fixture(scope="module")
def plain_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    hub = HubProcess(tmp_path_factory.mktemp("plain") / "hub")
    hub.start()
    yield hub
    hub.kill()


@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/run", "/v1/openapi.json", f"/v1/blobs/{'0' * 64}"])
def test_page_whose_name_leads_to_hub_reads_nothing(plain_hub: HubProcess, path: str) -> None:
    """A page of evil.example lets its name lead to 127.0.0.1; its requests name that host."""
    name = f"evil.example:{plain_hub.port}"
    answer = plainly(f"{plain_hub.address}{path}", headers={"host": name})
    assert answer.status_code == 421
    problem = decode_message(Problem, answer.content)
    assert (problem.kind, problem.message) == ("host", f"this hub is not known as {name}")
    for allowed in (f"127.0.0.1:{plain_hub.port}", "localhost"):
        assert plainly(f"{plain_hub.address}{path}", headers={"host": allowed}).status_code in (200, 404)


@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/run", "/v1/nowhere", f"/v1/blobs/{'0' * 64}"])
@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_every_answer_has_headers_for_browsers(plain_hub: HubProcess, path: str, host: str) -> None:
    answer = plainly(f"{plain_hub.address}{path}", headers={"host": host})
    assert {name: answer.headers.get(name) for name in BROWSER_HEADERS} == BROWSER_HEADERS


def test_member_is_told_of_wrong_name(plain_hub: HubProcess) -> None:
    """A proxy that sends a name of its own: the hub signs the reason, so the member can show it."""
    client = HubClient([plain_hub.address], plain_hub.invite().hub_id, NodeKey.generate())
    client._http_client(plain_hub.address).headers["host"] = "proxy.internal"
    with pytest.raises(HubRefused, match=r"not known as proxy\.internal"):
        client.ask("GET", "/v1/run", RunDescription)
    client.close()


def test_hub_with_token_answers_proxy_and_own_machine(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "hub", environment={"BARNRAISE_HOSTING_PROXY_TOKEN": TOKEN})
    hub.start()
    try:
        assert plainly(f"{hub.address}/v1/run").status_code == 403
        assert plainly(f"{hub.address}/v1/run", headers={PROXY_HEADER: TOKEN}).status_code == 200
        key = NodeKey.generate()
        client = HubClient([hub.address], hub.invite().hub_id, key, proxy_token=TOKEN)
        assert client.ask("GET", "/v1/run", RunDescription).name == "fireside"
        client.close()
    finally:
        hub.kill()


def test_token_goes_to_own_machine_only() -> None:
    addresses = ["http://hub.example.org", "https://127.0.0.1:9", "http://127.0.0.1:9", "http://localhost:9"]
    client = HubClient(addresses, NodeKey.generate().id, NodeKey.generate(), proxy_token=TOKEN)
    assert [PROXY_HEADER in client._proof(httpx.URL(address)) for address in addresses] == [
        False,
        False,
        True,
        True,
    ]
