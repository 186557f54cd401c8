"""How much of what members send is in a hub's memory at once, and who can keep others waiting."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import httpx
import pytest

from backyard.hub.founding import found_hub
from backyard.hub.intake import Intake
from backyard.hub.log import Member
from backyard.hub.messages import PIECE_BYTES, Progress
from backyard.hub.serving import running
from backyard.hub.signing import sign_request
from backyard.identity import NodeId, NodeKey
from tests.unit.hub.hub_process import TERMS, Friend, HubProcess

MANY = 40


def _piece(client: httpx.AsyncClient, key: NodeKey, hub: NodeId, number: int) -> asyncio.Task[httpx.Response]:
    path, query, data = f"/v1/uploads/{number:032x}", "offset=0", bytes(PIECE_BYTES // 4)
    headers = sign_request(key, "PATCH", path, query, data, hub, time.time())
    return asyncio.create_task(client.patch(f"http://hub{path}?{query}", content=data, headers=headers))


def test_large_pieces_wait_until_those_before_them_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only until they are read: what has been read is in memory until it is in its file."""
    here, most = 0, 0

    async def append(self: Intake, node: str, name: str, offset: int, data: bytes) -> Progress:
        nonlocal here, most
        here += 1
        most = max(most, here)
        await asyncio.sleep(0.01)
        here -= 1
        return Progress(id=name, offset=len(data), size=PIECE_BYTES)

    def progress(self: Intake, node: str, name: str) -> Progress:
        return Progress(id=name, offset=0, size=PIECE_BYTES)

    async def scene() -> None:
        async with running(tmp_path) as (hub, app):
            for key in keys:
                node = str(key.id)
                hub.members[node] = Member(node=node, name="ann", role="friend", since=0.0)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
                pieces = [_piece(client, keys[number // 2], hub.id, number) for number in range(MANY)]
                answers = await asyncio.gather(*pieces)
            assert {answer.status_code for answer in answers} == {200}

    keys = [NodeKey.generate() for _ in range(MANY // 2)]
    found_hub(tmp_path, "fireside", keys[0].id, TERMS)
    monkeypatch.setattr(Intake, "append", append)
    monkeypatch.setattr(Intake, "progress", progress)
    asyncio.run(scene())
    assert 1 < most < MANY // 2


def _begin_to_join(hub: NodeId, port: int) -> socket.socket:
    """As a stranger, of whose body nothing comes."""
    signed = sign_request(NodeKey.generate(), "POST", "/v1/members", "", b"", hub, time.time())
    lines = ["POST /v1/members HTTP/1.1", "host: hub", "content-length: 9"]
    lines += [f"{name}: {value}" for name, value in signed.items()]
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    return connection


def test_strangers_who_begin_and_never_end_keep_nobody_waiting(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "hub")
    connections: list[socket.socket] = []
    try:
        hub.start()
        invite = hub.invite()
        connections += [_begin_to_join(invite.hub_id, hub.port) for _ in range(MANY)]
        time.sleep(0.5)
        friend = Friend(hub.address, invite.hub_id)
        friend.http.timeout = httpx.Timeout(20.0)
        assert friend.join(invite).role == "friend"
        friend.close()
    finally:
        hub.kill()
        for connection in connections:
            connection.close()
