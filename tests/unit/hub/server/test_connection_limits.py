"""Connection limits of a hub, in total and per address, and the errors beyond them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.responses import Response

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.invites import Invite
from barnraise.hub.protocol.messages import Problem, decode_message
from barnraise.hub.protocol.signatures import sign_request, verify_response
from barnraise.hub.server import connection_limits
from barnraise.hub.server.app import error_response
from barnraise.hub.server.connection_limits import (
    ConnectionLimiter,
    LimitedServer,
    SlowClientProtocol,
    connections_within,
    source_of,
)
from barnraise.hub.server.health import HealthStatus
from barnraise.hub.server.server import running_hub
from barnraise.hub.server.unsigned_allowance import UnsignedLimits
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import create_hub, hub_blobs, hub_key
from barnraise.identity import NodeKey
from tests.unit.hub.hub_process import TERMS, Friend, HubProcess, Refused


def test_source_of_address_groups_ipv6_network() -> None:
    assert source_of("203.0.113.5") == source_of("::ffff:203.0.113.5") == "203.0.113.5"
    assert source_of("2001:db8:1:2:aaaa::1") == source_of("2001:db8:1:2:bbbb::9")
    assert source_of("2001:db8:1:2::1") != source_of("2001:db8:1:3::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2%eth0")
    assert {source_of(own) for own in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")} == {""}


def test_one_address_gets_many_but_not_all_connections() -> None:
    assert ConnectionLimiter(8192).of_one == 1024
    assert ConnectionLimiter(600).of_one == 256
    limiter = ConnectionLimiter(20, of_one=5)
    assert [limiter.admit("203.0.113.5") for _ in range(5)] == ["in"] * 5
    assert [limiter.admit("203.0.113.5") for _ in range(5)] == ["crowded"] * 4 + ["out"]
    assert limiter.admit("203.0.113.6") == "in"
    limiter.release("203.0.113.5", "crowded")
    assert limiter.admit("203.0.113.5") == "crowded", "a connection that gets the error is available again"
    limiter.release("203.0.113.5", "in")
    assert limiter.admit("203.0.113.5") == "in"


def test_local_proxy_is_limited_in_total_only() -> None:
    limiter = ConnectionLimiter(20, of_one=5)
    assert [limiter.admit("127.0.0.1") for _ in range(20)] == ["in"] * 20
    assert not limiter.has_room
    verdicts = [limiter.admit("127.0.0.1") for _ in range(100)]
    assert verdicts == ["full"] * 64 + ["out"] * 36
    for _ in range(20):
        limiter.release("127.0.0.1", "in")
    assert limiter.has_room
    assert limiter.admit("203.0.113.5") == "in"


def test_connection_limit_leaves_open_files() -> None:
    assert connections_within(None, 8192) == connections_within(1 << 20, 8192) == 8192
    assert connections_within(1024, 8192) == 448
    assert connections_within(64, 8192) == 1


def test_excess_connections_of_address_get_error_and_others_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "source_of", lambda address: address)  # 127.0.0.2 is another home
    create_hub(tmp_path, "fireside", NodeKey.generate().id, TERMS)
    key = hub_key(tmp_path)

    def check(port: int) -> None:
        with contextlib.ExitStack() as held:
            for _ in range(3):
                held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            answer, headers = ask(
                port, "127.0.0.1"
            )  # the fourth connection, after the three that were accepted
            assert answer.status_code == 429
            verify_response(key.id, 429, answer.headers, answer.content, headers)
            problem = decode_message(Problem, answer.content)
            assert (problem.kind, problem.retry_s) == ("rate", 10.0)
            assert "this address already has" in problem.message
            assert answer.headers["connection"] == "close"
            assert ask(port, "127.0.0.2")[0].status_code == 200
        _until(lambda: ask(port, "127.0.0.1")[0].status_code == 200, "as soon as they are gone")

    def ask(port: int, source: str) -> tuple[httpx.Response, dict[str, str]]:
        headers = sign_request(NodeKey.generate(), "GET", "/v1/run", "", b"", key.id, time.time())
        with httpx.Client(transport=httpx.HTTPTransport(local_address=source), timeout=60) as line:
            return line.get(f"http://127.0.0.1:{port}/v1/run", headers=headers), headers

    _serve(tmp_path, check, key)


def _until(holds: Callable[[], bool], what: str) -> None:
    give_up, is_so = time.monotonic() + 60, False
    while not is_so:
        assert time.monotonic() < give_up, what
        with contextlib.suppress(httpx.TransportError):  # too many were told, and not even that is said
            is_so = holds()
        time.sleep(0.02)


def _serve(directory: Path, check: Callable[[int], None], key: NodeKey) -> None:
    """Run a hub in this process while the check of its port runs."""

    async def scene() -> None:
        async with running_hub(directory, limits=UnsignedLimits(bytes_s=0.0)) as (_, app):
            config = uvicorn.Config(app, http=SlowClientProtocol, log_level="warning", lifespan="off")

            def respond(headers: Mapping[str, str], error: HubRefused) -> Response:
                return error_response(key, headers, error, time.time())

            server = LimitedServer(config, ConnectionLimiter(20, of_one=3), HealthStatus(), respond)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.setblocking(False)
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                try:
                    await asyncio.to_thread(check, listener.getsockname()[1])
                finally:
                    server.should_exit = True
                    await serving

    asyncio.run(scene())


@pytest.mark.parametrize("reads", [False, True])
def test_client_that_never_reads_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    if not reads:
        monkeypatch.setattr(connection_limits, "_UNREAD_S", 0.3)
    create_hub(tmp_path, "fireside", NodeKey.generate().id, TERMS)
    size, lost, clocks = 32 << 20, threading.Event(), list[asyncio.TimerHandle]()
    name = hub_blobs(tmp_path).put(bytes(size))
    connection_lost, pause_writing = SlowClientProtocol.connection_lost, SlowClientProtocol.pause_writing

    def noted(self: SlowClientProtocol, error: Exception | None) -> None:
        connection_lost(self, error)
        lost.set()

    def paused(self: SlowClientProtocol) -> None:
        pause_writing(self)
        assert self._unread is not None
        clocks.append(self._unread)

    monkeypatch.setattr(SlowClientProtocol, "connection_lost", noted)
    monkeypatch.setattr(SlowClientProtocol, "pause_writing", paused)
    blobs = BlobStore.sweep
    monkeypatch.setattr(BlobStore, "sweep", lambda self, needed: blobs(self, {*needed, name}))

    def check(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
            line.sendall(f"GET /v1/blobs/{name} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            _until(lambda: bool(clocks), "the hub waits for its reader")
            if not reads:
                assert lost.wait(60)
                return
            arrived = 0
            while arrived < size:
                part = line.recv(1 << 16)
                assert part, "it was cut off"
                arrived += len(part)
            # The time limit restarts with each read, so a slow reader stays connected.
            _until(lambda: all(clock.cancelled() for clock in list(clocks)), "no time limit is pending")
            assert not lost.is_set()

    _serve(tmp_path, check, hub_key(tmp_path))


@contextlib.contextmanager
def _with_files(folder: Path, soft: int, hard: int) -> Iterator[HubProcess]:
    limit = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"'
    hub = HubProcess(folder / "hub", wrapper=["sh", "-c", limit, "sh"])
    hub.start()
    try:
        yield hub
    finally:
        hub.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hub_raises_limit_of_open_files(tmp_path: Path) -> None:
    with _with_files(tmp_path, 300, 2000) as hub:
        limits = Path(f"/proc/{hub.pid}/limits").read_text()
        assert re.search(r"Max open files +2000 +2000", limits)


@pytest.mark.skipif(os.name == "nt", reason="there is no such limit")
def test_full_hub_reports_it_and_recovers(tmp_path: Path) -> None:
    with _with_files(tmp_path, 200, 200) as hub, contextlib.ExitStack() as held:
        max_connections = connections_within(200, 8192)
        assert f"permits only {max_connections} connections" in hub.output()
        invite = hub.invite()
        friend = Friend(hub.address, invite.hub_id)
        held.callback(friend.close)
        lines = [
            socket.create_connection(("127.0.0.1", hub.port), timeout=10) for _ in range(max_connections)
        ]
        with pytest.raises(Refused, match="503 busy: the hub has no free connections"):
            friend.join(invite)
        assert hub.output().count(f"all {max_connections} connections of this hub are in use") == 1
        for line in lines:
            line.close()
        _until(lambda: _joins(friend, invite), "there is room")
        # The hub logs it at the next accepted connection.
        _until(lambda: _comes_in(hub) and "the hub accepts connections again" in hub.output(), "the log line")


def _joins(friend: Friend, invite: Invite) -> bool:
    try:
        return friend.join(invite).role == "friend"
    except Refused:
        return False


def _comes_in(hub: HubProcess) -> bool:
    return httpx.get(f"{hub.address}/v1/run", timeout=60, trust_env=False, verify=False).status_code == 200
