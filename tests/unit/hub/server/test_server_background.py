"""Background tasks of a hub, a mirror and a region survive errors; idle connections are closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import uvicorn
from uvicorn.server import ServerState

from barnraise.core.errors import HubError, HubRefused
from barnraise.hub.aggregation.aggregator import ClosedRound
from barnraise.hub.aggregation.outer_step import first_version
from barnraise.hub.mirror.mirror import HubMirror
from barnraise.hub.mirror.server import keep_following
from barnraise.hub.protocol.messages import Lease, SampleSpan, UpdateDeclaration, VersionStep
from barnraise.hub.region import region
from barnraise.hub.region.region import ParentHub, RegionAggregator, run_region
from barnraise.hub.rounds.leases import PendingUpdate
from barnraise.hub.server import connection_limits
from barnraise.hub.server.hub import Hub
from barnraise.hub.server.server import make_outer_step
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import create_hub, hub_key
from barnraise.hub.storage.log import AcceptedUpdate
from barnraise.identity import NodeKey
from tests.unit.hub.hub_process import LAYOUT, TERMS, encoded


async def _some_time(work: Any, holds: Callable[[], bool]) -> None:
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(60):
        while not holds():
            assert not task.done(), "it has ended"
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_mirror_continues_after_any_error(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def follow(wait_s: float) -> None:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise OSError("the disk is gone")

    mirror, hub = SimpleNamespace(follow=follow), SimpleNamespace(read=lambda: None)
    work = keep_following(cast(HubMirror, mirror), cast(Hub, hub), 0.01)
    with caplog.at_level(logging.ERROR):
        asyncio.run(_some_time(work, lambda: calls > 3))
    assert "the disk is gone" in caplog.text


def test_region_continues_after_any_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def describe() -> None:
        nonlocal calls
        calls += 1
        raise OSError("the disk is gone")

    monkeypatch.setattr(region, "_PAUSE_S", 0.01)
    work = run_region(cast(Hub, None), cast(ParentHub, SimpleNamespace(describe=describe)))
    with caplog.at_level(logging.ERROR):
        asyncio.run(_some_time(work, lambda: calls > 3))
    assert "the disk is gone" in caplog.text


def test_hub_keeps_ticking_if_log_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(tmp_path, hub_key(tmp_path).id, make_outer_step)

        async def step(event: object) -> None:
            raise HubError("the hub's log failed")

        async def sleep(seconds: float) -> None:
            paused.append(seconds)

        monkeypatch.setattr(hub, "step", step)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await hub._tick_once()
        await hub.close()

    paused: list[float] = []
    create_hub(tmp_path, "fireside", NodeKey.generate().id, TERMS)
    asyncio.run(story())
    assert paused == [1.0]


class Refusing:
    """Parent that refuses every update of the region, and has no newer version."""

    def __init__(self) -> None:
        self.lease: Lease | None = Lease(
            id="0" * 32, version=0, spans=(SampleSpan(0, 0, 10),), steps=1, seconds=10.0, void_s=10.0
        )
        self.calls = 0

    def push(self, declaration: UpdateDeclaration) -> None:
        raise HubRefused(422, "norm", "its norm is too large")

    def steps(self, after: int | None, wait: float = 0.0) -> tuple[VersionStep, ...]:
        self.calls += 1
        assert self.calls < 5, "no member will deliver the version that it waits for"
        return ()


def _closed(sha256: str, size: int) -> ClosedRound:
    """Return a round of one update."""
    update, spans = PendingUpdate("u", "ann", "l", 0, 10), (SampleSpan(0, 0, 10),)
    arrival = AcceptedUpdate(update=update, sha256=sha256, size=size, spans=spans, norm=1.0, scale=1.0)
    head = first_version(VersionStep("base", 0, "0" * 64, 1, "fp32"), 0.0)
    return ClosedRound((arrival,), frozenset(), head, (head,), 0.0)


def test_region_with_refused_update_takes_another_lease(tmp_path: Path) -> None:
    blobs, parent = BlobStore(tmp_path), Refusing()
    data = encoded(torch.randn(LAYOUT.numel), TERMS.codec, 0)
    finisher = RegionAggregator(blobs, TERMS, LAYOUT, cast(ParentHub, parent))
    try:
        merged = finisher.merge(_closed(blobs.put(data), len(data)))
    finally:
        finisher.close()
    assert (merged.versions, merged.contributions) == ((), ())
    assert parent.lease is None


class Away(Refusing):
    """Parent whose connection breaks during an upload."""

    def push(self, declaration: UpdateDeclaration) -> None:
        raise HubError("the disk of this machine failed")


def test_killed_region_pushes_same_update_again(tmp_path: Path) -> None:
    """The mean of one update may be that update, byte by byte, so its blob stays while the log names it."""
    blobs = BlobStore(tmp_path)
    data = encoded(torch.zeros(LAYOUT.numel), TERMS.codec, 0)
    closed = _closed(blobs.put(data), len(data))
    for parent in (Away(), Away()):
        finisher = RegionAggregator(blobs, TERMS, LAYOUT, cast(ParentHub, parent))
        with pytest.raises(HubError, match="failed"):
            finisher.merge(closed)
        finisher.close()
    finisher = RegionAggregator(blobs, TERMS, LAYOUT, cast(ParentHub, Refusing()))
    merged = finisher.merge(closed)
    finisher.close()
    assert closed.arrivals[0].sha256 in merged.spent, "it goes when the log has forgotten it"
    assert all(blobs.has(name) for name in merged.spent)


def test_region_without_lease_merges_nothing(tmp_path: Path) -> None:
    parent = Refusing()
    parent.lease = None
    finisher = RegionAggregator(BlobStore(tmp_path), TERMS, LAYOUT, cast(ParentHub, parent))
    try:
        assert finisher.merge(_closed("0" * 64, 100)).versions == ()
    finally:
        finisher.close()


def test_client_without_request_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def story() -> None:
        config = uvicorn.Config(
            app,
            http=connection_limits.SlowClientProtocol,
            lifespan="off",
            log_level="warning",
            timeout_keep_alive=60,
        )
        config.load()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: connection_limits.SlowClientProtocol(config, ServerState(), {}), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        line = socket.create_connection(("127.0.0.1", port))
        line.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")  # before its time begins
        asking = await asyncio.open_connection(sock=line)
        silent, halting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        halting[1].write(b"GET / HTTP/1.1\r\nhost:")
        async with asyncio.timeout(60):
            assert await silent[0].read() == b""
            assert await halting[0].read() == b""
            assert b"204" in await asking[0].readline()
            assert await asking[0].readline() == b"\r\n"
        asking[1].write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(60):
            assert b"204" in await asking[0].readline(), (
                "a connection with an earlier request may send another later"
            )
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):  # a request sent byte by byte is cut off
                while not asking[0].at_eof():
                    asking[1].write(b"G")
                    await asyncio.sleep(0.1)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(asking[0].read(100), 0.01)
        for _, writer in (silent, halting, asking):
            writer.close()
        server.close()

    monkeypatch.setattr(connection_limits, "_FIRST_REQUEST_S", 0.3)
    asyncio.run(story())


def test_new_region_leases_for_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "GATHER_S", 0.1)
    hub = SimpleNamespace(state=SimpleNamespace(wishes={"first": 5}))

    async def gathered() -> tuple[int, int]:
        asking = asyncio.create_task(region._wished_samples(cast(Hub, hub), is_first=True))
        await asyncio.sleep(0.02)
        hub.state.wishes = {"first": 5, "second": 7}
        first_count = await asking
        hub.state.wishes = {"first": 5}
        async with asyncio.timeout(0.05):  # after a round all members have sent their wishes
            return first_count, await region._wished_samples(cast(Hub, hub), is_first=False)

    assert asyncio.run(gathered()) == (12, 5)
