"""A hub in the test's own process, with members that call it directly."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import torch

from barnraise.hub.protocol.invites import Invite
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    HubProgress,
    Lease,
    LeaseRequest,
    RoundConfig,
    UpdateDeclaration,
)
from barnraise.hub.protocol.signatures import sign_request
from barnraise.hub.server.app import HubApp, make_app
from barnraise.hub.server.bodies import ArrivedBody
from barnraise.hub.server.hub import Hub
from barnraise.hub.server.server import make_outer_step
from barnraise.hub.server.uploads import UploadService
from barnraise.hub.storage.create import create_hub, create_invite, hub_blobs, hub_key
from barnraise.identity import NodeKey
from tests.unit.hub.hub_process import LAYOUT, TERMS, declared, encoded

COURSE = HubDataOrder(samples=100_000, batch=10)
ADDRESS = ("https://hub.test",)


class InProcessHub:
    """Hub in this process, with helpers that act as its members."""

    def __init__(self, directory: Path, hub: Hub) -> None:
        self.directory, self.hub, self.intake = directory, hub, UploadService(hub)
        self.keys: dict[str, NodeKey] = {}

    async def join(self, invite: Invite, name: str = "ann") -> str:
        key = NodeKey.generate()
        node = str(key.id)
        self.keys[node] = key
        await self.hub.join(node, invite.request(key.id, name))
        return node

    async def member(self) -> str:
        return await self.join(create_invite(self.directory, ADDRESS))

    async def lease(self, node: str, rate: float = 0.0) -> Lease:
        return await self.hub.lease(node, LeaseRequest(samples_per_s=rate, version=self.hub.version or 0))

    async def send(self, node: str, declaration: UpdateDeclaration, data: bytes) -> HubProgress:
        progress = await self.intake.declare(node, declaration)
        while not progress.accepted:
            rest = ArrivedBody.in_memory(data[progress.offset :])
            progress = await self.intake.append(node, progress.id, progress.offset, rest)
        return progress

    async def half_sent(self) -> tuple[str, Lease, bytes]:
        """Return a new member whose update has arrived except for its last byte."""
        node = await self.member()
        lease = await self.lease(node)
        data = update(lease)
        progress = await self.intake.declare(node, declared(lease, data))
        await self.intake.append(node, progress.id, 0, ArrivedBody.in_memory(data[:-1]))
        return node, lease, data

    async def round(self, node: str) -> None:
        lease = await self.lease(node)
        data = update(lease)
        await self.send(node, declared(lease, data), data)
        await asyncio.wait_for(self.until(lambda: self.hub.version == lease.version + 1), 30)

    def line(self, address: str = "127.0.0.1") -> httpx.AsyncClient:
        self.reception = HubApp(self.hub, self.intake, hub_key(self.directory))
        return self.again(address)

    def again(self, address: str) -> httpx.AsyncClient:
        """Return another HTTP client of the same hub."""
        app = make_app(self.reception)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(address, 1)))

    async def ask(
        self,
        line: httpx.AsyncClient,
        key: NodeKey,
        request_line: str,
        data: bytes = b"",
        content: AsyncIterator[bytes] | None = None,
    ) -> httpx.Response:
        method, _, target = request_line.partition(" ")
        path, _, query = target.partition("?")
        headers = sign_request(key, method, path, query, data, self.hub.id, time.time())
        return await line.request(method, f"http://hub{target}", content=content or data, headers=headers)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    def partial_files(self) -> int:
        return len(list((self.directory / "uploads").iterdir()))


def update(lease: Lease) -> bytes:
    return encoded(torch.randn(LAYOUT.numel) * 0.01, TERMS.codec, lease.version)


@contextlib.asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[InProcessHub]:
    hub = Hub(directory, hub_key(directory).id, make_outer_step)
    try:
        await hub.start()
        yield InProcessHub(directory, hub)
    finally:
        await hub.close()


def play(
    directory: Path, story: Callable[[InProcessHub], Awaitable[None]], terms: RoundConfig = TERMS
) -> None:
    """Run a test with a hub that has its base and its code."""
    blobs, owner = hub_blobs(directory), NodeKey.generate()
    kept = blobs.put(b"print()")
    create_hub(directory, "fireside", owner.id, terms, code=blobs.put(b"{}"), kept=[kept])

    async def whole() -> None:
        async with opened(directory) as scene:
            data = encoded(torch.randn(LAYOUT.numel), "fp32", 0)
            base = UpdateDeclaration(
                kind="base",
                sha256=hashlib.sha256(data).hexdigest(),
                size=len(data),
                layout=LAYOUT,
                course=COURSE,
            )
            await scene.send(str(owner.id), base, data)
            await story(scene)

    asyncio.run(whole())
