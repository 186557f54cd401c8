"""Broadcast finder with real UDP on loopback and a plain socket as the other machine."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from barnraise.core.flow.rate_limit import RateLimit
from barnraise.discovery import namespace_tag
from barnraise.discovery.broadcast import BroadcastFinder, broadcast_addresses
from barnraise.discovery.datagrams import Datagram, decode_datagram, encode_datagram
from tests.unit.discovery.sighting_recorder import OURS, THEIRS, SightingRecorder, loopback, until

OTHER = "127.0.0.2"


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _other(port: int) -> Iterator[socket.socket]:
    """Return a socket of another machine, bound to an address of its own."""
    if not hasattr(socket, "SO_REUSEPORT"):
        pytest.skip("two sockets cannot share a port here")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            other.bind((OTHER, port))
        except OSError:
            pytest.skip(f"{OTHER} is not an address of this machine")
        other.setblocking(False)
        yield other


@asynccontextmanager
async def _finder(
    port: int, *, patience: float = 0.05, tags: frozenset[str] = frozenset({OURS})
) -> AsyncIterator[tuple[BroadcastFinder, SightingRecorder]]:
    finder = BroadcastFinder(port, targets=lambda: [OTHER], addresses=loopback, patience_s=patience)
    notebook = SightingRecorder()
    await finder.start(notebook)
    finder.advertise(tags, 4001)
    finder.watch(frozenset({OURS}))
    try:
        yield finder, notebook
    finally:
        await finder.stop()


def _receive(other: socket.socket) -> list[tuple[Datagram | None, tuple[str, int]]]:
    received = []
    while True:
        try:
            data, sender = other.recvfrom(100)
        except BlockingIOError:
            return received
        received.append((decode_datagram(data), sender))


async def _next(other: socket.socket) -> tuple[Datagram | None, tuple[str, int]]:
    received: list[tuple[Datagram | None, tuple[str, int]]] = []
    await until(lambda: bool(received.extend(_receive(other)) or received))
    return received[0]


def test_broadcast_queries_after_patience_and_sights_answer() -> None:
    async def body() -> None:
        port = _free_port()
        with _other(port) as other:
            async with _finder(port) as (finder, heard):
                question, sender = await _next(other)
                assert question == Datagram("question", OURS, 4001)
                for answer in (Datagram("answer", THEIRS, 4003), Datagram("answer", OURS, 4002)):
                    other.sendto(encode_datagram(answer), sender)
                await until(lambda: heard.places() == {(OTHER, 4002, OURS)})
                assert finder.health() is None

    asyncio.run(body())


def test_broadcast_pauses_while_tag_is_seen_by_others() -> None:
    async def body() -> None:
        port = _free_port()
        with _other(port) as other:
            async with _finder(port, patience=0.1) as (finder, _):
                finder.seen(OURS)
                await asyncio.sleep(0.3)
                assert _receive(other) == []
                finder.refresh()
                await asyncio.sleep(0.2)
                assert _receive(other) == []
                finder.watch(frozenset({OURS, THEIRS}))
                question, _ = await _next(other)
                # We cannot be found under their tag, so that no port is told.
                assert question == Datagram("question", THEIRS, 0)

    asyncio.run(body())


def test_broadcast_answers_advertised_tags_within_rate_limit() -> None:
    async def body() -> None:
        port = _free_port()
        with _other(port) as other:
            async with _finder(port, patience=60) as (finder, heard):
                target = ("127.0.0.1", port)
                for data in (
                    b"",
                    b"bkyd",
                    bytes(24),
                    encode_datagram(Datagram("question", OURS, 0)) + b"x",
                    encode_datagram(Datagram("question", namespace_tag(b"?"), 0)),
                ):
                    other.sendto(data, target)
                await asyncio.sleep(0.1)
                assert _receive(other) == []
                began = time.monotonic()
                for asker in (*[4002] * 49, 4003):
                    other.sendto(encode_datagram(Datagram("question", OURS, asker)), target)
                # A question with our tag and a port is a sighting of its sender.
                await until(lambda: heard.places() == {(OTHER, 4002, OURS), (OTHER, 4003, OURS)})
                answers: list[Datagram | None] = []
                await until(
                    lambda: bool(answers.extend(datagram for datagram, _ in _receive(other)) or answers)
                )
                assert set(answers) == {Datagram("answer", OURS, 4001)}
                assert len(answers) <= 5 + (time.monotonic() - began), "four at once, then one in a second"
                finder.advertise(frozenset(), 4001)
                finder._answers = RateLimit(1.0, 4.0, in_total=1.0, total_burst=16.0)
                other.sendto(encode_datagram(Datagram("question", OURS, 0)), target)
                await asyncio.sleep(0.1)
                assert _receive(other) == []

    asyncio.run(body())


def test_two_agents_of_one_machine_share_the_port() -> None:
    async def body() -> None:
        port = _free_port()
        finders, notebooks = [], []
        for number in (1, 2):
            finder = BroadcastFinder(
                port, targets=lambda: ["127.255.255.255"], addresses=loopback, patience_s=0.05
            )
            notebooks.append(SightingRecorder())
            await finder.start(notebooks[-1])
            finder.advertise(frozenset({OURS}), 4000 + number)
            finders.append(finder)
        if finders[1].health() is not None:
            pytest.skip("two sockets cannot share a port here")
        for finder in finders:
            finder.watch(frozenset({OURS}))
        await until(lambda: ("127.0.0.1", 4002, OURS) in notebooks[0].places())
        await until(lambda: ("127.0.0.1", 4001, OURS) in notebooks[1].places())
        for finder in finders:
            await finder.stop()

    asyncio.run(body())


def test_broadcast_port_that_is_taken_is_in_health() -> None:
    async def body() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
            holder.bind(("0.0.0.0", 0))
            port = holder.getsockname()[1]
            finder = BroadcastFinder(port)
            await finder.start(SightingRecorder())
            finder.watch(frozenset({OURS}))
            assert f"port {port} is taken" in (finder.health() or "")
            await asyncio.sleep(0.05)
            await finder.stop()

    asyncio.run(body())


def test_network_without_broadcast_is_in_health() -> None:
    async def body() -> None:
        finder = BroadcastFinder(_free_port(), targets=lambda: ["no address"], patience_s=0.0)
        await finder.start(SightingRecorder())
        finder.watch(frozenset({OURS}))
        await until(lambda: finder.health() is not None)
        await finder.stop()

    asyncio.run(body())


def test_each_network_has_its_broadcast_address() -> None:
    addresses = broadcast_addresses()
    assert addresses
    assert not any(address.startswith("127.") for address in addresses)
