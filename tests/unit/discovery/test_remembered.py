"""Addresses of known machines."""

from __future__ import annotations

import asyncio

import pytest

from barnraise.core.errors import ConfigError
from barnraise.core.flow.backoff import Backoff
from barnraise.discovery import UNTAGGED, remembered
from barnraise.discovery.remembered import KnownAddress, RememberedFinder
from barnraise.discovery.static import StaticFinder
from tests.unit.discovery.sighting_recorder import OURS, SightingRecorder, until


def test_remembered_finder_reports_addresses_while_node_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_BACKOFF", Backoff(0.2, 60.0))

    async def body() -> None:
        finder, heard = RememberedFinder(), SightingRecorder()
        finder.remember(
            [KnownAddress("aa", ("192.0.2.1", "2001:db8::1"), 1), KnownAddress("bb", ("192.0.2.2",), 2)]
        )
        finder.present(frozenset({"bb"}))
        finder.watch(frozenset({OURS}))
        await finder.start(heard)
        await until(lambda: heard.places() == {("192.0.2.1", 1, UNTAGGED), ("2001:db8::1", 1, UNTAGGED)})
        heard.sightings.clear()
        finder.present(frozenset({"aa"}))
        await until(lambda: heard.places() == {("192.0.2.2", 2, UNTAGGED)})
        await until(lambda: len(heard.sightings) >= 2)
        await finder.stop()

    asyncio.run(body())


def test_remembered_finder_memory_is_bounded() -> None:
    many = [
        KnownAddress(f"{number:04x}", tuple(f"10.0.0.{n}" for n in range(200)), 1) for number in range(1000)
    ]
    finder = RememberedFinder(many)
    assert len(finder._places) == 256
    assert all(len(place.addresses) == 16 for place in finder._places.values())
    with pytest.raises(ConfigError, match="more than"):
        StaticFinder([f"h{number}" for number in range(300)], 1)
