"""A proxy between a real hub and a real member changes the messages; the client detects the change."""

from __future__ import annotations

import hashlib
import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace as replace_struct

from barnraise.core.errors import HubAway, HubError
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.invites import Invite
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    JoinRequest,
    JoinResponse,
    LeaseRequest,
    RunDescription,
    VersionHead,
    decode_message,
    encode_message,
)
from barnraise.identity import NodeKey
from tests.unit.hub.hub_process import LAYOUT, Friend, HubProcess, Refused

COURSE = HubDataOrder(samples=1000, batch=10, seed=7)


@dataclass(frozen=True)
class SentRequest:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class SentResponse:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Evil:
    """Manipulations of the proxy, until they are changed."""

    request: Callable[[SentRequest], SentRequest] = field(default=lambda request: request)
    answer: Callable[[SentResponse], SentResponse] = field(default=lambda answered: answered)
    times: int = 1  # that each request is sent to the hub


class Proxy(ThreadingHTTPServer):
    """HTTP proxy to a hub that applies ``evil``."""

    daemon_threads = True

    def __init__(self, hub_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Carrier)
        self.hub_port, self.evil, self.carried = hub_port, Evil(), 0
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def carry(self, request: SentRequest) -> SentResponse:
        request = self.evil.request(request)
        for _ in range(self.evil.times):
            line = http.client.HTTPConnection("127.0.0.1", self.hub_port, timeout=60)
            line.request(request.method, request.target, request.body or None, request.headers)
            response = line.getresponse()
            answered = SentResponse(response.status, dict(response.getheaders()), response.read())
            line.close()
        self.carried += 1
        return self.evil.answer(answered)


class _Carrier(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _carry(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        ours = ("content-length", "connection")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ours}
        answered = self.server.carry(SentRequest(self.command, self.path, headers, body))
        self.send_response_only(answered.status)
        for name, value in answered.headers.items():
            if name.lower() not in ours:
                self.send_header(name, value)
        self.send_header("content-length", str(len(answered.body)))
        self.end_headers()
        self.wfile.write(answered.body)

    do_GET = do_POST = do_PATCH = _carry

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path_factory.mktemp("altering") / "hub")
    process.start()
    owner = Friend(process.address, process.invite().hub_id, process.owner)
    try:
        owner.push_base(torch.randn(LAYOUT.numel), COURSE)
        yield process
    finally:
        owner.close()
        process.kill()


@pytest.fixture
def proxy(hub: HubProcess) -> Iterator[Proxy]:
    made = Proxy(hub.port)
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def invite(hub: HubProcess, proxy: Proxy) -> Invite:
    return msgspec.structs.replace(hub.invite(), addresses=(proxy.address,))


@pytest.fixture
def member(invite: Invite, proxy: Proxy) -> Iterator[HubClient]:
    """Return a member that joined while the proxy was honest."""
    key = NodeKey.generate()
    client = HubClient(invite.addresses, invite.hub_id, key, sleep=lambda seconds: None)
    client.ask("POST", "/v1/members", JoinResponse, invite.request(key.id, "ann"))
    yield client
    client.close()


def _changed(headers: dict[str, str], name: str, value: str) -> dict[str, str]:
    return {known: value if known.lower() == name else kept for known, kept in headers.items()}


@pytest.mark.parametrize(
    ("evil", "words"),
    [
        (
            Evil(
                answer=lambda response: replace(
                    response, body=response.body.replace(b"fireside", b"evilside")
                )
            ),
            "in transit",
        ),
        (Evil(answer=lambda response: replace(response, body=b"")), "was changed in transit"),
        (
            Evil(answer=lambda response: replace(response, status=201)),
            "not signed with the key of the invite",
        ),
        (Evil(answer=lambda response: replace(response, headers={})), "the hub did not sign the response"),
        (
            Evil(answer=lambda response: SentResponse(502, {}, b"<h1>Bad Gateway</h1>")),
            "cannot reach the hub",
        ),
        (Evil(answer=lambda response: SentResponse(413, {}, b"")), "client_max_body_size"),
    ],
)
def test_changed_response_is_rejected(member: HubClient, proxy: Proxy, evil: Evil, words: str) -> None:
    proxy.evil = evil
    with pytest.raises(HubAway, match=words) as caught:
        member.ask("GET", "/v1/run", RunDescription)
    assert proxy.address in caught.value.message
    assert caught.value.answered == ("cannot reach" not in words)


@pytest.mark.parametrize(
    ("evil", "words"),
    [
        (
            Evil(lambda request: replace(request, body=request.body + b" ")),
            "the body is not the one that was signed",
        ),
        (
            Evil(lambda request: replace(request, target=f"{request.target}?wait=1")),
            "does not belong to the request",
        ),
        (
            Evil(
                lambda request: replace(request, headers=_changed(request.headers, "barnraise-hub", "A" * 69))
            ),
            "meant for another hub",
        ),
        (Evil(times=2), "was received before"),
    ],
)
def test_changed_request_is_reported_with_address(
    member: HubClient, proxy: Proxy, evil: Evil, words: str
) -> None:
    proxy.evil = evil
    carried = proxy.carried
    with pytest.raises(HubAway, match=words) as caught:
        member.ask("POST", "/v1/leases", LeaseRequest, LeaseRequest(samples_per_s=1.0, version=0))
    assert f"on its way through {proxy.address}" in caught.value.message
    assert proxy.carried == carried + 2, "it was signed and sent once more"


def test_repeated_request_is_signed_again(member: HubClient, proxy: Proxy) -> None:
    """A proxy that lost its connection to the hub may repeat a request that the hub has handled."""

    def only_now(request: SentRequest) -> SentRequest:
        proxy.evil.times = 2 if proxy.carried == carried else 1
        return request

    carried = proxy.carried
    proxy.evil = Evil(only_now)
    assert member.ask("GET", "/v1/run", RunDescription).name == "fireside"
    assert proxy.carried == carried + 2


def test_other_address_is_used_if_one_is_tampered(hub: HubProcess, proxy: Proxy) -> None:
    invite = hub.invite()
    proxy.evil = Evil(lambda request: replace(request, body=request.body + b" "))
    key = NodeKey.generate()
    client = HubClient([proxy.address, hub.address], invite.hub_id, key)
    joined = client.ask("POST", "/v1/members", JoinResponse, invite.request(key.id, "bob"))
    assert joined.role == "friend"
    assert client.address == hub.address
    client.close()


def test_changed_blob_is_refused_by_name(member: HubClient, proxy: Proxy, tmp_path: Path) -> None:
    step = member.ask("GET", "/v1/head", VersionHead).steps[0]
    proxy.evil = Evil(
        answer=lambda response: replace(response, body=response.body[:-1] + bytes([response.body[-1] ^ 1]))
    )
    with pytest.raises(HubError, match="sent wrong content") as caught:
        member.fetch(step.sha256, tmp_path / "base", size=step.size)
    assert proxy.address in caught.value.message
    assert list(tmp_path.iterdir()) == []
    proxy.evil = Evil()
    member.fetch(step.sha256, tmp_path / "base", size=step.size)
    assert hashlib.sha256((tmp_path / "base").read_bytes()).hexdigest() == step.sha256


def test_proxy_that_reads_a_join_cannot_join_itself(hub: HubProcess, proxy: Proxy) -> None:
    """A proxy that ends TLS keeps the first request to join back, and tries everything in it for itself."""
    invite, attacker = hub.invite(), Friend(hub.address, hub.invite().hub_id)
    own = Friend(proxy.address, invite.hub_id)
    refusals: list[str] = []

    def steal(request: SentRequest) -> SentRequest:
        seen = decode_message(JoinRequest, request.body)
        forged = [seen, replace_struct(seen, role="owner"), replace_struct(seen, invite=str(attacker.key.id))]
        for join in forged:
            with pytest.raises(Refused) as refused:
                attacker.ask("POST", "/v1/members", JoinResponse, join)
            refusals.append(refused.value.problem.kind)
        return request

    proxy.evil = Evil(steal)
    try:
        assert own.join(invite).role == "friend", "the invite still has its only use"
    finally:
        proxy.evil = Evil()
        attacker.close()
        own.close()
    assert refusals == ["invite"] * 3
    assert invite.key not in encode_message(invite.request(own.key.id, "ann"))
