"""Upload slots: how many bytes of uploads a hub holds in memory, and which members delay others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.messages import PIECE_BYTES, HubDataOrder, HubProgress, VectorEntry, VectorLayout
from barnraise.hub.protocol.signatures import sign_request
from barnraise.hub.server.server import running_hub
from barnraise.hub.server.upload_slots import AT_ONCE, FAIR_S, UploadSlots
from barnraise.hub.server.uploads import UploadService
from barnraise.hub.storage.create import create_hub
from barnraise.hub.storage.log import MemberRecord
from barnraise.identity import NodeId, NodeKey
from tests.unit.hub.hub_process import TERMS, Friend, HubProcess, declared, encoded

MANY = 40


def _piece(client: httpx.AsyncClient, key: NodeKey, hub: NodeId, number: int) -> asyncio.Task[httpx.Response]:
    path, query, data = f"/v1/uploads/{number:032x}", "offset=0", bytes(PIECE_BYTES // 4)
    headers = sign_request(key, "PATCH", path, query, data, hub, time.time())
    return asyncio.create_task(client.patch(f"http://hub{path}?{query}", content=data, headers=headers))


def test_large_pieces_wait_for_earlier_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is in memory until it is in its file, so later pieces wait until then."""
    pieces_in_memory, max_pieces = 0, 0

    async def append(self: UploadService, node: str, name: str, offset: int, data: bytes) -> HubProgress:
        nonlocal pieces_in_memory, max_pieces
        pieces_in_memory += 1
        max_pieces = max(max_pieces, pieces_in_memory)
        await asyncio.sleep(0.01)
        pieces_in_memory -= 1
        return HubProgress(id=name, offset=len(data), size=PIECE_BYTES)

    async def scene() -> None:
        async with running_hub(tmp_path) as (hub, app):
            for key in keys:
                node = str(key.id)
                hub.members[node] = MemberRecord(node=node, name="ann", role="friend", since=0.0)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
                pieces = [_piece(client, keys[number // 2], hub.id, number) for number in range(MANY)]
                answers = await asyncio.gather(*pieces)
            assert {answer.status_code for answer in answers} == {200}

    keys = [NodeKey.generate() for _ in range(MANY // 2)]
    create_hub(tmp_path, "fireside", keys[0].id, TERMS)
    monkeypatch.setattr(UploadService, "append", append)
    monkeypatch.setattr(UploadService, "note_piece", lambda *_: None)
    asyncio.run(scene())
    assert 1 < max_pieces < MANY // 2


def _begin_to_join(hub: NodeId, port: int) -> socket.socket:
    """Start a request of an unknown node whose body never arrives."""
    signed = sign_request(NodeKey.generate(), "POST", "/v1/members", "", b"", hub, time.time())
    lines = ["POST /v1/members HTTP/1.1", "host: localhost", "content-length: 9"]
    lines += [f"{name}: {value}" for name, value in signed.items()]
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    return connection


def test_unfinished_requests_of_strangers_delay_no_member(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "hub")
    connections: list[socket.socket] = []
    try:
        hub.start()
        invite = hub.invite()
        connections += [_begin_to_join(invite.hub_id, hub.port) for _ in range(MANY)]
        friend = Friend(hub.address, invite.hub_id)
        friend.http.timeout = httpx.Timeout(60.0)  # a body has twice as long to arrive
        assert friend.join(invite).role == "friend"
        friend.close()
    finally:
        hub.kill()
        for connection in connections:
            connection.close()


def test_waiting_member_shortens_oldest_deadline() -> None:
    async def slow(places: UploadSlots, member: str, has_come: asyncio.Event) -> str:
        try:
            async with places.slot(member), places.reading(has_slot=True):
                await has_come.wait()
        except HubRefused as error:
            return error.kind
        return "read"

    async def scene() -> None:
        slots, second_sent, sent = (
            UploadSlots(at_once=2, of_one=1, fair_s=0.2),
            asyncio.Event(),
            asyncio.Event(),
        )
        sent.set()
        first, second = (asyncio.create_task(slow(slots, name, second_sent)) for name in "ab")
        while len(slots._reading) < 2:
            await asyncio.sleep(0)
        assert await slow(slots, "c", sent) == "read"
        assert await first == "slow", "a member waited, so the oldest upload was cut off"
        assert not second.done()
        second_sent.set()
        assert await second == "read"
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(0.4, later.set)
        assert await slow(slots, "d", later) == "read", "no other member waits, so it is not cut off"

    asyncio.run(scene())


LARGE = VectorLayout((VectorEntry("weight", (400, 1000), "float32"),))


class Dawdler(threading.Thread):
    """Client that starts a piece again and again, and never finishes."""

    def __init__(self, friend: Friend, port: int, upload: str) -> None:
        super().__init__(daemon=True)
        self.friend, self.port, self.path = friend, port, f"/v1/uploads/{upload}"
        self.began, self.stopped = threading.Event(), threading.Event()
        self.answers: list[str] = []

    def run(self) -> None:
        while not self.stopped.is_set():
            data = bytes(200_000)
            signed = sign_request(
                self.friend.key, "PATCH", self.path, "offset=0", data, self.friend.hub, time.time()
            )
            lines = [
                f"PATCH {self.path}?offset=0 HTTP/1.1",
                "host: localhost",
                f"content-length: {len(data)}",
            ]
            lines += [f"{name}: {value}" for name, value in signed.items()]
            with (
                contextlib.suppress(OSError),  # the hub is gone
                socket.create_connection(("127.0.0.1", self.port), timeout=300) as line,
            ):
                line.sendall("\r\n".join([*lines, "", ""]).encode() + data[:1000])
                self.began.set()
                self.answers.append(line.recv(12).decode())


def test_eight_slow_members_do_not_stop_honest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.hub.hub_process.LAYOUT", LARGE)
    hub = HubProcess(tmp_path / "hub", msgspec.structs.replace(TERMS, round_s=10.0))
    friends: list[Friend] = []
    dawdlers: list[Dawdler] = []
    try:
        hub.start()
        invite = hub.invite(uses=9)
        friends += [Friend(hub.address, invite.hub_id, key) for key in (hub.owner, *[None] * 9)]
        owner, honest, *others = friends
        owner.push_base(torch.zeros(LARGE.numel), HubDataOrder(samples=100_000, batch=10))
        for friend in (honest, *others):
            friend.join(invite)
        for friend in others:
            lease = friend.lease()
            data = encoded(torch.randn(LARGE.numel), TERMS.codec, lease.version)
            upload = friend.ask("POST", "/v1/uploads", HubProgress, declared(lease, data)).id
            dawdlers += [Dawdler(friend, hub.port, upload) for _ in range(2)]
        assert len(dawdlers) == AT_ONCE
        for dawdler in dawdlers:
            dawdler.start()
        assert all(dawdler.began.wait(60) for dawdler in dawdlers)
        time.sleep(0.5)
        begin = time.monotonic()
        assert honest.push(honest.lease(), torch.randn(LARGE.numel) * 0.01).accepted
        waited = time.monotonic() - begin
        print(f"an honest member waited for {waited:.1f} s")
        assert waited < 3 * FAIR_S, "it had two minutes to wait"
        give_up = time.monotonic() + 60
        while "HTTP/1.1 408" not in [answer for dawdler in dawdlers for answer in list(dawdler.answers)]:
            assert time.monotonic() < give_up, "no member was told to send less"
            time.sleep(0.05)
    finally:
        for dawdler in dawdlers:
            dawdler.stopped.set()
        hub.kill()
        for friend in friends:
            friend.close()
