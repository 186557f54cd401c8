"""Attacks on a hub and its friends: by readers, by web pages, by its proxy and by its regions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from barnraise.core.errors import HubError, HubRefused
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.messages import JoinResponse, RoundConfig, RunDescription, VersionHead
from barnraise.identity.keys import NodeKey
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.hub import AttackedHubRun
from benchmarks.hub.emulated_members import Leaf, create_run
from benchmarks.hub.process import HubProcess

_TERMS = RoundConfig(chunk=2048)
_READERS, _READING_S = 8, 4.0
_BURST, _RATE = 1 << 20, 0.25e6  # bytes, and bytes/s, that all readers may have together
_UNPACKED = 64 << 20
_STRANGERS, _LIMITED_S = 8, 50.0


class _Answer(BaseHTTPRequestHandler):
    server: _OneAnswer

    def do_GET(self) -> None:
        self.server.requests += 1
        self.send_response(200)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _OneAnswer(ThreadingHTTPServer):
    """Server with the same answer for every request."""

    daemon_threads = True

    def __init__(self, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.body, self.headers, self.requests = body, headers, 0
        self.address = f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def _serving(body: bytes, **headers: str) -> Iterator[_OneAnswer]:
    server = _OneAnswer(body, {name.replace("_", "-"): value for name, value in headers.items()})
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def _reason(request: Callable[[], object]) -> str:
    """Return why a request of a friend failed. One that succeeds is a success of the attack."""
    try:
        request()
    except HubError as error:
        return error.message
    raise AssertionError("the friend took the answer")


def _packed(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


@attack(
    "proxy-compresses-answer",
    "hub's proxy",
    "answers a friend with a few bytes that unpack to many megabytes",
    AttackedHubRun,
)
def compress_answer(scene: AttackedHubRun) -> str:
    body = _packed(_packed(bytes(_UNPACKED)))
    with _serving(body, content_encoding="gzip, gzip") as server:
        client = HubClient([server.address], scene.hub.invite().hub_id, NodeKey.generate())
        with contextlib.closing(client):
            why = _reason(lambda: client.ask("GET", "/v1/run", RunDescription))
            assert "compresses its answers" in why, why
            assert client.received_bytes == 0, f"{client.received_bytes} bytes were taken"
        assert server.requests == 1
    return f"{len(body)} bytes were not unpacked"


@attack(
    "page-takes-name",
    "stranger at a hub",
    "lets the name of a web page lead to a hub behind a proxy, and reads it in the browser on its machine",
    AttackedHubRun,
)
def take_name(scene: AttackedHubRun) -> str:
    hub = HubProcess(scene.folder / "plain", _TERMS, name="hidden", plain=True)
    hub.start()
    try:
        with httpx.Client(trust_env=False, timeout=30.0) as browser:
            for path in ("/", "/metrics", "/v1/run", "/v1/head", "/v1/openapi.json"):
                name = f"evil.example:{hub.port}"
                answer = browser.get(f"{hub.address}{path}", headers={"host": name})
                assert answer.status_code == 421, f"{path}: {answer.status_code}"
                assert "hidden" not in answer.text
            assert browser.get(f"{hub.address}/v1/run").status_code == 200, "its own machine cannot read it"
    finally:
        hub.kill()
    return "the hub answers only to its own names"


@attack(
    "reader-fills-uplink",
    "stranger at a hub",
    "downloads the model again and again from many connections",
    AttackedHubRun,
)
def fill_uplink(scene: AttackedHubRun) -> str:
    head = scene.run(scene.leaf(scene.hub.invite(), "reader").ask("GET", "/v1/head", VersionHead))
    url = f"{scene.hub.address}/v1/blobs/{head.steps[0].sha256}"
    began, received = time.monotonic(), [0] * _READERS

    def read(place: int) -> None:
        with httpx.Client(verify=False, trust_env=False, timeout=30.0) as line:  # it reads only
            while time.monotonic() - began < _READING_S:
                with line.stream("GET", url) as answer:
                    for part in answer.iter_raw():
                        received[place] += len(part) if answer.status_code == 200 else 0

    readers = [threading.Thread(target=read, args=(place,)) for place in range(_READERS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60.0)
    took_s = time.monotonic() - began
    assert sum(received) <= _BURST + 1.1 * _RATE * took_s, f"{sum(received)} bytes in {took_s:.1f} s"
    return f"{sum(received) / 1e6:.1f} MB in {took_s:.1f} s, and members went on"


@attack(
    "stranger-crowds-out-joins",
    "stranger at a hub",
    "sends signed requests without end, so that an invited machine cannot join",
    AttackedHubRun,
)
def crowd_out_joins(scene: AttackedHubRun) -> str:
    invite = scene.hub.invite()
    is_over = asyncio.Event()  # a cancelled request may end as a refused one, so cancelling is not enough

    async def flood(stranger: Leaf, is_limited: asyncio.Event) -> None:
        while not is_over.is_set():
            try:
                await stranger.ask("GET", "/v1/run", RunDescription)
            except HubRefused:
                is_limited.set()

    async def attack(floods: list[asyncio.Task[None]]) -> None:
        is_limited = asyncio.Event()
        strangers = [scene.leaf(invite, f"stranger {number}") for number in range(_STRANGERS)]
        floods += [asyncio.create_task(flood(stranger, is_limited)) for stranger in strangers]
        await asyncio.wait_for(is_limited.wait(), _LIMITED_S)

    async def end(floods: list[asyncio.Task[None]]) -> None:
        is_over.set()
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)

    friend = scene.leaf(invite, "invited")
    floods: list[asyncio.Task[None]] = []
    try:
        scene.run(attack(floods))
        request = invite.request(friend.key.id, friend.name)
        scene.run(friend.ask("POST", "/v1/members", JoinResponse, request))  # with time of its own
    finally:
        scene.run(end(floods))
    assert "invited" in scene.members()
    return "the invited machine joined while strangers were rejected"


@attack(
    "region-changes-model",
    "hub's owner",
    "gives the members of its region a model of its own under its own key",
    AttackedHubRun,
)
def change_model(scene: AttackedHubRun) -> str:
    region = HubProcess(scene.folder / "other-model", _TERMS, name="attacked")
    region.start()
    try:
        owner = scene.leaf(region.invite("owner"), "owner", region.owner)
        scene.run(create_run(owner, 8192))
        place, root = region.invite().place, scene.hub.invite().hub_id
        client = HubClient(place.addresses, place.hub, NodeKey.generate(), root=root, led_from="machine")
        with contextlib.closing(client):
            why = _reason(lambda: client.head(None))
            assert "did not sign version 0" in why, why
    finally:
        region.kill()
    return "the member checks each version with the key of the run's hub"


@attack(
    "region-leads-inside",
    "hub's owner",
    "names services of the members' own machine as the addresses of its region",
    AttackedHubRun,
)
def lead_inside(scene: AttackedHubRun) -> str:
    with _serving(b"{}") as service:
        port = service.server_port
        addresses = [service.address, f"https://127.0.0.1:{port}", f"https://[::ffff:127.0.0.1]:{port}"]
        client = HubClient(
            addresses, scene.hub.invite().hub_id, NodeKey.generate(), pinned=False, led_from="internet"
        )
        with contextlib.closing(client):
            why = _reason(lambda: client.ask("GET", "/v1/run", RunDescription))
            assert "may not lead to" in why, why
        assert service.requests == 0, "the service was asked"
    return "no connection was opened"
