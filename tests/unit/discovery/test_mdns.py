"""mDNS finder with real packets on the loopback interface."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from barnraise.discovery import mdns
from barnraise.discovery.mdns import MdnsFinder
from tests.unit.discovery.sighting_recorder import OURS, THEIRS, SightingRecorder, loopback, until


def _multicast_works() -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            group = socket.inet_aton("224.0.0.251") + socket.inet_aton("127.0.0.1")
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _multicast_works(), reason="no multicast on loopback here")


@asynccontextmanager
async def _finder(
    tags: frozenset[str], port: int, watched: frozenset[str]
) -> AsyncIterator[tuple[MdnsFinder, SightingRecorder]]:
    finder, notebook = MdnsFinder(loopback), SightingRecorder()
    await finder.start(notebook)
    finder.advertise(tags, port)
    finder.watch(watched)
    try:
        yield finder, notebook
    finally:
        await finder.stop()


def test_mdns_finds_same_tag_and_ignores_other_tag() -> None:
    async def body() -> None:
        ours, theirs = frozenset({OURS}), frozenset({THEIRS})
        async with (
            _finder(ours, 4001, ours) as (first, heard_first),
            _finder(ours, 4002, ours) as (_, heard_second),
            _finder(theirs, 4003, theirs) as (_, heard_third),
        ):
            await until(lambda: ("127.0.0.1", 4002, OURS) in heard_first.places())
            await until(lambda: ("127.0.0.1", 4001, OURS) in heard_second.places())
            await asyncio.sleep(0.3)
            assert heard_first.places() == {("127.0.0.1", 4002, OURS)}, "nor itself"
            assert heard_third.places() == set()
            assert first.health() is None
            assert {sighting.source for sighting in heard_first.sightings} == {"mdns"}

    asyncio.run(body())


def test_mdns_offer_appears_moves_and_vanishes() -> None:
    async def body() -> None:
        ours = frozenset({OURS})
        async with (
            _finder(ours, 4001, ours) as (offering, _),
            _finder(frozenset(), 0, frozenset()) as (joining, heard),
        ):
            await asyncio.sleep(0.3)
            offering.advertise(frozenset({OURS, THEIRS}), 4001)
            await asyncio.sleep(0.3)
            assert heard.sightings == []
            # A search also finds what was announced before the search started.
            joining.watch(frozenset({THEIRS}))
            await until(lambda: heard.places() == {("127.0.0.1", 4001, THEIRS)})
            offering.advertise(frozenset({OURS, THEIRS}), 4009)
            await until(lambda: ("127.0.0.1", 4009, THEIRS) in heard.places())
            offering.advertise(ours, 4009)
            await until(lambda: THEIRS not in offering._services)
            await asyncio.sleep(1.2)  # records that were taken back are kept for one second
            async with asyncio.timeout(60):  # and for two minutes that were not
                while True:
                    heard.sightings.clear()
                    joining.refresh()
                    await asyncio.sleep(0.5)
                    if not heard.sightings:
                        break

    asyncio.run(body())


def test_mdns_instance_names_are_random_at_each_start() -> None:
    async def body() -> set[str]:
        async with _finder(frozenset({OURS}), 4001, frozenset()) as (finder, _):
            await until(lambda: bool(finder._services))
            (info,) = finder._services.values()
            assert info.properties == {b"t": OURS.encode()}
            assert info.server is not None
            return {info.name, info.server}

    first, second = asyncio.run(body()), asyncio.run(body())
    assert len(first | second) == 4
    for name in first | second:
        label = name.partition(".")[0]
        assert bytes.fromhex(label)
        assert socket.gethostname() not in label


def test_mdns_refresh_reports_live_machines_again() -> None:
    async def body() -> None:
        ours = frozenset({OURS})
        async with _finder(ours, 4001, frozenset()), _finder(frozenset(), 0, ours) as (looking, heard):
            await until(lambda: bool(heard.sightings))
            await asyncio.sleep(1.1)
            heard.sightings.clear()
            looking.refresh()
            await until(lambda: bool(heard.sightings))

    asyncio.run(body())


def test_mdns_ignores_garbage_on_wire() -> None:
    async def body() -> None:
        ours = frozenset({OURS})
        async with _finder(ours, 4001, ours) as (finder, heard):
            await until(lambda: finder._heard)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
                for length in (0, 1, 12, 100, 1400):
                    for _ in range(20):
                        noise = os.urandom(length)
                        sender.sendto(noise, ("224.0.0.251", 5353))
                        sender.sendto(b"\0\0\x84\0\0\0\0\1\0\0\0\0" + noise, ("224.0.0.251", 5353))
            async with _finder(ours, 4002, ours):
                await until(lambda: heard.places() == {("127.0.0.1", 4002, OURS)})
            assert finder.health() is None

    asyncio.run(body())


def test_mdns_without_multicast_shows_health_and_recovers() -> None:
    async def body() -> None:
        addresses = ["203.0.113.254"]  # of a documentation network: no socket can be bound to it
        finder, heard = MdnsFinder(lambda: addresses, poll_s=0.1), SightingRecorder()
        await finder.start(heard)
        finder.advertise(frozenset({OURS}), 4001)
        finder.watch(frozenset({OURS}))
        try:
            await until(lambda: finder.health() is not None)
            assert "5353" in (finder.health() or "")
            addresses[:] = ["127.0.0.1"]
            await until(lambda: finder.health() is None and finder._heard)
            async with _finder(frozenset({OURS}), 4002, frozenset()):
                await until(lambda: heard.places() == {("127.0.0.1", 4002, OURS)})
        finally:
            await finder.stop()
            await finder.stop()

    asyncio.run(body())


def test_mdns_rejoins_adapter_that_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has forgotten the group membership of an adapter with a new index."""

    async def body() -> None:
        ours = frozenset({OURS})
        async with _finder(ours, 4001, ours) as (finder, heard):
            await until(lambda: finder._heard)
            before = finder._zeroconf
            monkeypatch.setattr(mdns, "_number", lambda interface: 4711)
            finder.refresh()
            await until(lambda: finder._zeroconf not in (None, before) and finder._heard)
            async with _finder(ours, 4002, ours):
                await until(lambda: heard.places() == {("127.0.0.1", 4002, OURS)})

    asyncio.run(body())


def test_mdns_notices_socket_that_receives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with _finder(frozenset({OURS}), 4001, frozenset({OURS})) as (finder, _):
            await until(lambda: finder._heard)
            finder._heard = False
            monkeypatch.setattr(mdns, "_DEAF_AFTER_S", 3600.0)
            assert finder.health() is None
            monkeypatch.setattr(mdns, "_DEAF_AFTER_S", -time.monotonic())
            assert "5353" in (finder.health() or "")

    asyncio.run(body())
