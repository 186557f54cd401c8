"""Discovery service: it runs all finders and passes new sightings."""

from __future__ import annotations

import asyncio

import pytest

from barnraise.core.errors import DiscoveryError
from barnraise.discovery import UNTAGGED, Discovery, Finder, Sighting
from barnraise.discovery.finder import OnSighting
from tests.unit.discovery.sighting_recorder import OURS, THEIRS, SightingRecorder


class _Finder:
    """Finder that reports what the test passes in, and records its calls."""

    def __init__(self, name: str, *, strangers: bool = True, broken: bool = False) -> None:
        self.name = name
        self.finds_strangers = strangers
        self.broken = broken
        self.trouble: str | None = None
        self.told: list[object] = []
        self.say: OnSighting = lambda sighting: None

    async def start(self, on_sighting: OnSighting) -> None:
        if self.broken:
            raise RuntimeError("broken on purpose")
        self.say = on_sighting

    def advertise(self, tags: frozenset[str], port: int) -> None:
        self.told.append((tags, port))

    def watch(self, tags: frozenset[str]) -> None:
        self.told.append(tags)

    def refresh(self) -> None:
        self.told.append("refresh")

    def seen(self, tag: str) -> None:
        self.told.append(tag)

    async def stop(self) -> None:
        self.told.append("stop")
        if self.broken:
            raise RuntimeError("broken on purpose")

    def health(self) -> str | None:
        return self.trouble


def test_discovery_combines_all_finders() -> None:
    async def body() -> None:
        first, second = _Finder("first"), _Finder("second", strangers=False)
        finders: list[Finder] = [first, second]
        discovery, heard = Discovery(finders, addresses=lambda: ["192.0.2.1"]), SightingRecorder()
        await discovery.start(heard)
        discovery.advertise(frozenset({OURS}), 9)
        discovery.watch(frozenset({OURS}))
        news = Sighting("192.0.2.2", 9, OURS, "first")
        for sighting in (
            news,
            Sighting("192.0.2.2", 9, OURS, "second"),
            Sighting("192.0.2.1", 9, OURS, "first"),
            Sighting("192.0.2.3", 9, THEIRS, "first"),
        ):
            first.say(sighting)
        assert heard.sightings == [news]
        assert second.told == [(frozenset({OURS}), 9), frozenset({OURS}), OURS]
        second.say(Sighting("192.0.2.2", 9, UNTAGGED, "second"))
        assert len(heard.sightings) == 2
        assert second.told[-1] == OURS, "a place without a tag proves nothing about a tag"
        discovery.refresh()
        first.say(news)
        assert heard.sightings[-1] == news
        assert len(heard.sightings) == 3
        assert news in discovery.sightings()
        await discovery.stop()
        first.say(Sighting("192.0.2.9", 9, OURS, "first"))
        assert len(heard.sightings) == 3
        assert second.told[-3:] == ["refresh", OURS, "stop"]

    asyncio.run(body())


def test_discovery_with_broken_finder_uses_others() -> None:
    async def body() -> None:
        broken, well = _Finder("broken", broken=True), _Finder("well")
        discovery, heard = Discovery([broken, well], addresses=list), SightingRecorder()
        await discovery.start(heard)
        discovery.watch(frozenset({OURS}))
        well.say(Sighting("192.0.2.2", 9, OURS, "well"))
        assert len(heard.sightings) == 1
        health = discovery.health()
        assert health["well"] is None
        assert "broken on purpose" in (health["broken"] or "")
        discovery.check()
        await discovery.stop()
        assert well.told[-1] == "stop"

    asyncio.run(body())


def test_discovery_without_working_finder_raises_with_reasons() -> None:
    async def body() -> None:
        first, known = _Finder("first"), _Finder("known", strangers=False)
        discovery = Discovery([first, known])
        await discovery.start(SightingRecorder())
        discovery.check()
        first.trouble = "the moon is full"
        with pytest.raises(DiscoveryError, match="first: the moon is full") as caught:
            discovery.check()
        assert "--at HOST" in caught.value.hint
        await discovery.stop()

    asyncio.run(body())
