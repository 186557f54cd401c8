"""Addresses that a hub names for its regions: a new member dials only where the hub may lead."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from barnraise.core.errors import HubAway
from barnraise.hub.client.client import HubClient
from barnraise.hub.client.name_resolution import led_target
from barnraise.hub.protocol.messages import RunDescription
from barnraise.identity import NodeKey
from barnraise.transport.addresses import Where

# What a region would like new members to ask: their router, their own services, a cloud's metadata.
INSIDE = (
    "https://192.168.1.1/admin",
    "https://10.0.0.7:8443",
    "https://127.0.0.1:9000/x",
    "https://[::1]:9000",
    "https://169.254.169.254",
    "https://[fe80::1]",
    "https://[::ffff:192.168.1.1]",
    "https://[64:ff9b::c0a8:101]",
    "https://0.0.0.0",
    "http://203.0.113.5",
)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("address", INSIDE)
def test_hub_on_internet_leads_to_internet_only(address: str) -> None:
    with pytest.raises(HubAway, match="may not lead to"):
        led_target(httpx.URL(address), "internet")


@pytest.mark.parametrize(
    ("address", "led_from"),
    [
        ("https://8.8.8.8:52480", "internet"),
        ("https://192.168.1.20:52480", "network"),
        ("https://8.8.8.8", "network"),
        ("http://127.0.0.1:52480", "machine"),
        ("https://192.168.1.20", "machine"),
    ],
)
def test_hub_leads_to_its_own_network(address: str, led_from: Where) -> None:
    url = httpx.URL(address)
    target = led_target(url, led_from)
    assert target.address == url.host
    assert target.headers["host"] == url.netloc.decode()


def test_nothing_is_dialled_behind_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(HubAway, match="cannot be checked behind a proxy"):
        led_target(httpx.URL("https://8.8.8.8"), "internet")


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.hosts.append(self.headers.get("host", ""))
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Server that notes the hosts that it was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hosts: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.shutdown()
    started.server_close()


def _client(address: str, led_from: Where) -> HubClient:
    return HubClient([address], NodeKey.generate().id, NodeKey.generate(), led_from=led_from)


def test_server_of_own_machine_is_not_asked_for_hub_elsewhere(server: Server, tmp_path: Path) -> None:
    """A region of a hub on the internet names a service of the new member's own machine."""
    client = _client(f"http://127.0.0.1:{server.server_port}/secret", "internet")
    with pytest.raises(HubAway, match="may not lead to"):
        client.ask("GET", "/v1/run", RunDescription)
    with pytest.raises(HubAway, match="may not lead to"):
        client._fetch_once("0" * 64, tmp_path / "draft", 1, 1)
    client.close()
    assert server.hosts == []


def test_name_is_resolved_once_and_checked_address_is_dialled(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name's owner changes its address between the check and the connection."""
    lookups: list[str] = []
    getaddrinfo = socket.getaddrinfo

    def look_up(host: Any, *more: Any, **named: Any) -> Any:
        lookups.append(str(host))
        if host == "region.example":
            host = "127.0.0.1" if lookups.count("region.example") == 1 else "127.0.0.99"
        return getaddrinfo(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    client = _client(f"http://region.example:{server.server_port}", "machine")
    for _ in range(2):
        with pytest.raises(HubAway, match="answered 404"):
            client.ask("GET", "/v1/run", RunDescription)
    client.close()
    assert server.hosts == [f"region.example:{server.server_port}"] * 2
    assert lookups.count("region.example") == 1


def test_client_knows_network_of_its_hub(server: Server) -> None:
    client = HubClient([f"http://127.0.0.1:{server.server_port}"], NodeKey.generate().id, NodeKey.generate())
    assert client.network == "nowhere"
    with pytest.raises(HubAway):
        client.ask("GET", "/v1/run", RunDescription)
    assert client.network == "machine"
    client.close()
