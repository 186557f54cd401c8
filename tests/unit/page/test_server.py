"""The server of the page: loopback only, bounded connections, slow and oversized requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import psutil
import pytest

from barnraise.core.errors import AgentError
from barnraise.page.server import PageServer, _bind
from barnraise.transport.addresses import own_addresses
from benchmarks.page.invented import InventedMachine, ServedPage, served


def _port(page: ServedPage) -> int:
    return int(page.root.split(":")[2].partition("/")[0])


async def _say(port: int, words: bytes, host: str = "127.0.0.1") -> bytes:
    source, sink = await asyncio.open_connection(host, port)
    try:
        sink.write(words)
        return await asyncio.wait_for(source.read(4096), 10)
    except OSError:
        return b""
    finally:
        sink.close()
        with contextlib.suppress(OSError):
            await sink.wait_closed()


def test_page_listens_on_loopback_only() -> None:
    async def go() -> None:
        async with served(InventedMachine()) as page:
            port = _port(page)
            own = [
                each for each in psutil.Process().net_connections() if each.laddr and each.laddr.port == port
            ]
            assert {each.laddr.ip for each in own if each.status == "LISTEN"} == {"127.0.0.1"}
            for address in own_addresses()[:3]:
                with pytest.raises(OSError):
                    await asyncio.open_connection(address, port)

    asyncio.run(go())


def test_oversized_requests_are_refused() -> None:
    async def go() -> None:
        async with served(InventedMachine()) as page:
            port = _port(page)
            long = await _say(port, b"GET /" + b"a" * 8000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b" 414 " in long
            many = await _say(port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 40_000)
            assert b" 200 " not in many
            body = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999\r\n\r\n"
            assert b" 403 " in await _say(port, body)
            assert b" 400 " in await _say(port, b"\x16\x03\x01\x00\xa5\r\n\r\n")

    asyncio.run(go())


def test_excess_connections_are_closed_and_the_others_still_answered() -> None:
    async def go() -> None:
        async with served(InventedMachine()) as page:
            port = _port(page)
            first = await asyncio.open_connection("127.0.0.1", port)
            rest = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
            await asyncio.sleep(0.3)
            closed = [source.at_eof() or source.exception() is not None for source, _ in rest]
            assert sum(closed) >= 200 - 64
            first[1].write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b" 403 " in await asyncio.wait_for(first[0].read(4096), 10)
            for _, sink in (first, *rest):
                sink.transport.abort()

    asyncio.run(go())


def test_port_is_free_again_after_the_server_has_closed_connections() -> None:
    first = _bind(0)
    port = first.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = first.accept()
        accepted.close()
        assert client.recv(1) == b""
    first.close()
    _bind(port).close()


def test_taken_port_is_an_error() -> None:
    async def go() -> None:
        async with served(InventedMachine()) as page:
            with pytest.raises(AgentError, match="cannot listen"):
                await PageServer(page.app, _port(page)).start()

    asyncio.run(go())
