"""Redirects to an object store: never into the member's own network, and never with its identity."""

from __future__ import annotations

import datetime
import hashlib
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from barnraise.hub.client.client import HubClient
from barnraise.hub.object_store.downloader import BucketDownloader, StoreLink
from barnraise.hub.object_store.redirects import (
    STORE_HEADER,
    allowed_addresses,
    network_of,
    origin_of,
    refusal_reason,
)
from barnraise.identity.keys import NodeKey, private_pem
from tests.unit.hub.client.fake_hub import FakeHub

DATA = bytes(range(256)) * 100
NAME = hashlib.sha256(DATA).hexdigest()
STORE = "https://store.example"


class Server(ThreadingHTTPServer):
    """Object store on loopback that records its requests."""

    def __init__(self, answer: bytes = DATA, status: int = 200, location: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.status, self.location = answer, status, location
        self.heard: list[tuple[str, dict[str, str]]] = []
        self.connections = 0
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        self.connections += 1
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect, as the tests intend."""

    def link(self, host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.server_port}/bucket/{NAME}?X-Amz-Signature=ab"

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.heard.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        first = int(self.headers.get("range", "bytes=0-")[6:-1])
        self.send_response(206 if first else self.server.status)
        if self.server.location:
            self.send_header("location", self.server.location)
        self.send_header("content-length", str(len(self.server.answer) - first))
        self.end_headers()
        self.wfile.write(self.server.answer[first:])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made: list[Server] = []
    yield made
    for server in made:
        server.end()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def take(link: str, draft: Path, hub: str = "127.0.0.1", size: int = len(DATA)) -> tuple[bool, list[str]]:
    messages: list[str] = []
    origin = origin_of(link)
    assert origin is not None
    line = BucketDownloader(origin, messages.append)
    try:
        return line.download(StoreLink(link, hub), NAME, draft, size), messages
    finally:
        line.close()


# decisions


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://Store.Example/a?b", STORE),
        ("https://store.example:443/a", STORE),
        ("https://store.example:9000/a", "https://store.example:9000"),
        ("http://[::1]:80/a", "http://[::1]"),
        ("https://user:word@store.example/a", None),
        ("ftp://store.example/a", None),
        ("/v1/blobs", None),
        ("https://", None),
        ("https://store.example:port/", None),
    ],
)
def test_origin_has_scheme_host_and_port(url: str, origin: str | None) -> None:
    assert origin_of(url) == origin


@pytest.mark.parametrize(
    ("link", "why"),
    [
        (f"{STORE}/bucket/{NAME}?sig", ""),
        (f"http://store.example/bucket/{NAME}", "another place"),
        (f"{STORE}:8443/bucket/{NAME}", "another place"),
        (f"https://store.example.evil.example/{NAME}", "another place"),
        (f"https://store.example@evil.example/{NAME}", "another place"),
        (f"//store.example/{NAME}", "another place"),
        (f"{STORE}/admin/restart", "something else"),
        (f"{STORE}/admin?x=/{NAME}", "something else"),
        (f"{STORE}/{NAME}?{'x' * 9000}", "cannot be read"),
        (f"{STORE}/\n{NAME}", "cannot be read"),
    ],
)
def test_link_must_name_accepted_origin_and_blob(link: str, why: str) -> None:
    reason = refusal_reason(link, STORE, NAME)
    assert why in reason
    assert bool(why) == bool(reason)


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.1", "machine"),
        ("::1", "machine"),
        ("::ffff:127.0.0.1", "machine"),
        ("64:ff9b::7f00:1", "machine"),
        ("192.168.1.1", "network"),
        ("10.0.0.1", "network"),
        ("100.64.0.1", "network"),
        ("fd00::1", "network"),
        ("2002:c0a8:101::1", "network"),
        ("8.8.8.8", "internet"),
        ("64:ff9b::808:808", "internet"),
        ("2001:4860:4860::8888", "internet"),
        ("169.254.169.254", "nowhere"),
        ("fe80::1%eth0", "nowhere"),
        ("0.0.0.0", "nowhere"),
        ("224.0.0.1", "nowhere"),
        ("", "nowhere"),
    ],
)
def test_network_of_address_is_classified(address: str, place: str) -> None:
    assert network_of(address) == place


def test_hub_redirects_into_network_only_from_inside() -> None:
    addresses = ("127.0.0.1", "192.168.1.1", "169.254.169.254", "8.8.8.8")
    assert allowed_addresses(addresses, "machine", "https") == ("127.0.0.1", "192.168.1.1", "8.8.8.8")
    assert allowed_addresses(addresses, "network", "https") == ("192.168.1.1", "8.8.8.8")
    assert allowed_addresses(addresses, "internet", "https") == ("8.8.8.8",)
    assert allowed_addresses(addresses, "nowhere", "https") == ("8.8.8.8",)
    assert allowed_addresses(addresses, "machine", "http") == ("127.0.0.1",), (
        "without TLS on this machine only"
    )


# what is done


def test_store_gets_plain_request_only(servers: list[Server], tmp_path: Path) -> None:
    servers.append(store := Server())
    assert take(store.link(), tmp_path / "draft") == (True, [])
    ((path, headers),) = store.heard
    assert path.startswith(f"/bucket/{NAME}?")
    assert set(headers) == {"host", "accept", "accept-encoding", "connection", "user-agent"}


@pytest.mark.parametrize("hub", ["8.8.8.8", "192.168.1.20", ""])
def test_remote_hub_cannot_redirect_to_this_machine(servers: list[Server], tmp_path: Path, hub: str) -> None:
    servers.append(store := Server())
    for host in ("127.0.0.1", "localhost"):
        taken, messages = take(store.link(host), tmp_path / "draft", hub)
        assert not taken
        assert "an address that this hub may not lead to" in messages[0]
    assert store.connections == 0


def test_redirect_of_store_is_not_followed(servers: list[Server], tmp_path: Path) -> None:
    servers.append(other := Server())
    servers.append(store := Server(status=302, location=other.link()))
    taken, messages = take(store.link(), tmp_path / "draft")
    assert not taken
    assert "it answered 302" in messages[0]
    assert other.connections == 0


def test_store_name_is_resolved_once_and_address_is_used(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.append(store := Server())
    resolved_hosts, getaddrinfo = [], socket.getaddrinfo

    def look_up(host: Any, *more: Any, **named: Any) -> Any:
        resolved_hosts.append(host)
        return getaddrinfo("127.0.0.1" if host == "store.example" else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert take(store.link("store.example"), tmp_path / "draft") == (True, [])
    assert resolved_hosts.count("store.example") == 1
    assert store.heard[0][1]["host"] == f"store.example:{store.server_port}"


@pytest.mark.parametrize(("named", "is_taken"), [("store.example", True), ("other.example", False)])
def test_store_needs_valid_certificate_for_name(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, is_taken: bool
) -> None:
    servers.append(store := Server())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_certificate(named, tmp_path))
    store.socket = context.wrap_socket(store.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    getaddrinfo = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **n: getaddrinfo("127.0.0.1" if host == "store.example" else host, *more, **n),
    )
    taken, messages = take(store.link("store.example", "https"), tmp_path / "draft")
    assert taken == is_taken, messages
    assert bool(store.heard) == is_taken


def test_store_response_larger_than_blob_is_refused(servers: list[Server], tmp_path: Path) -> None:
    servers.append(store := Server(DATA + bytes(1 << 20)))
    taken, messages = take(store.link(), tmp_path / "draft")
    assert not taken
    assert "more than the blob has" in messages[0]
    assert not (tmp_path / "draft").exists()


def test_partial_download_is_resumed_at_store(servers: list[Server], tmp_path: Path) -> None:
    servers.append(store := Server())
    (tmp_path / "draft").write_bytes(DATA[:1000])
    assert take(store.link(), tmp_path / "draft") == (True, [])
    assert store.heard[0][1]["range"] == "bytes=1000-"


# with a hub


class Leading(FakeHub):
    """Hub that redirects clients to a link if they accept redirects."""

    def __init__(self, room: Path, link: str) -> None:
        super().__init__(room)
        self.blobs[NAME] = DATA
        self._link, self.offers = link, []

    def _blob(self, request: httpx.Request) -> httpx.Response:
        self.offers.append(request.headers.get(STORE_HEADER))
        if self.offers[-1]:
            return httpx.Response(307, headers={"location": self._link})
        return super()._blob(request)


def fetched(hub: Leading, room: Path, store: str | None) -> list[str]:
    messages: list[str] = []
    client = HubClient(
        ["http://hub.test"],
        hub.key.id,
        NodeKey.generate(),
        say=messages.append,
        store=store,
        transport=hub.transport,
        sleep=lambda seconds: None,
    )
    for turn in range(2):
        client.fetch(NAME, room / f"fetched{turn}", size=len(DATA))
        assert (room / f"fetched{turn}").read_bytes() == DATA
    client.close()
    return messages


def test_refused_redirect_falls_back_to_hub(servers: list[Server], tmp_path: Path) -> None:
    servers.append(victim := Server())
    hub = Leading(tmp_path, victim.link())
    (message,) = fetched(hub, tmp_path, STORE)
    assert "another place than the one that was accepted; blobs come from the hub" in message
    assert hub.offers == [STORE, None, None]
    assert victim.connections == 0


def test_member_without_accepted_store_is_not_redirected(tmp_path: Path) -> None:
    hub = Leading(tmp_path, f"{STORE}/{NAME}")
    assert fetched(hub, tmp_path, None) == []
    assert hub.offers == [None, None]


def test_member_behind_proxy_downloads_from_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    hub = Leading(tmp_path, f"{STORE}/{NAME}")
    assert fetched(hub, tmp_path, STORE) == []
    assert hub.offers == [None, None]


def _certificate(named: str, folder: Path) -> tuple[Path, Path]:
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, named)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(named)]), critical=False)
        .sign(key, None)
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(private_pem(key))
    return folder / "cert.pem", folder / "key.pem"
