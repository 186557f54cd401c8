"""Link of a worker without a network: the broker dials and sends the preface."""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
from pathlib import Path

import pytest

from barnraise.collectives.comm_process.links.handshakes import HandshakeSecurity, SocketWait, dial
from barnraise.core.errors import BarnraiseError
from barnraise.transport.ipc.dial_broker import DialBroker, DialRules
from barnraise.transport.listener.preface import PREFACE_BYTES, Preface, encode, parse, refuse_route

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no broker on Windows")
SECRET, WORKER = b"s" * 32, b"w" * 16


def drive(address: str, port: int, broker: Path) -> str:
    """Run a dial to its end, and return the reason of its failure."""
    security = HandshakeSecurity(b"m" * 16, "mnist", b"", False, None, None, broker)
    steps = dial(address, port, WORKER, 0, security, lambda: True)
    try:
        for sock, wait in steps:
            event = selectors.EVENT_READ if wait is SocketWait.READ else selectors.EVENT_WRITE
            with selectors.DefaultSelector() as selector:
                selector.register(sock, event)
                assert selector.select(30)
    except BarnraiseError as error:
        return error.message
    raise AssertionError("the other side ends the handshake")


def test_dial_by_broker_begins_with_preface_of_its_worker(tmp_path: Path) -> None:
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readexactly(PREFACE_BYTES))
        writer.write(refuse_route())
        await writer.drain()
        writer.close()

    async def run() -> tuple[str, str]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        rules = DialRules(workers=frozenset({("127.0.0.1", port)}))

        def preface(worker: bytes, plaintext: bool) -> bytes:
            return encode(Preface(worker, os.urandom(16), plaintext=plaintext), SECRET)

        broker = DialBroker(tmp_path, lambda: rules, preface)
        broker.start()
        try:
            allowed = await asyncio.to_thread(drive, "127.0.0.1", port, broker.path)
            denied = await asyncio.to_thread(drive, "127.0.0.2", port, broker.path)
        finally:
            broker.close()
            server.close()
        return allowed, denied

    allowed, denied = asyncio.run(run())
    assert "no such worker is registered there" in allowed
    assert "127.0.0.2" in denied
    assert "not a machine of this run" in denied
    sent = parse(received[0], lambda route, target: SECRET)
    assert sent.target == WORKER
    assert len(received) == 1
