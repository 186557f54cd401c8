"""Peers that the settings name."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import ConfigError
from barnraise.discovery import UNTAGGED, static
from barnraise.discovery.remembered import KnownAddress, RememberedFinder
from barnraise.discovery.static import StaticFinder, StaticPeer, parse_peer
from tests.unit.discovery.sighting_recorder import OURS, SightingRecorder, until


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("nas.lan", StaticPeer("nas.lan", 52416)),
        ("nas.lan:7", StaticPeer("nas.lan", 7)),
        (" 192.0.2.7 ", StaticPeer("192.0.2.7", 52416)),
        ("192.0.2.7:65535", StaticPeer("192.0.2.7", 65535)),
        ("2001:db8::7", StaticPeer("2001:db8::7", 52416)),
        ("[2001:db8::7]", StaticPeer("2001:db8::7", 52416)),
        ("[2001:db8::7]:9", StaticPeer("2001:db8::7", 9)),
    ],
)
def test_parse_peer_accepts_hosts_and_addresses(text: str, peer: StaticPeer) -> None:
    assert parse_peer(text, 52416) == peer


NO_MACHINES = (
    *("", " ", "nas:", "nas:0", "nas:65536", "nas:-1", "nas:x", "nas:٣", "[2001:db8::7", "[2001:db8::7]9"),
    *("http://nas", "a b", "me@nas", "1:2:3", "127.0.1.1", "127.0.1.1:52416", "n" * 300),
)


@pytest.mark.parametrize("text", NO_MACHINES)
def test_parse_peer_rejects_other_text_with_hint(text: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.peers"):
        parse_peer(text, 52416)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_parse_peer_of_any_text_gives_peer_or_config_error(text: str) -> None:
    try:
        peer = parse_peer(text, 52416)
    except ConfigError:
        return
    assert peer.host
    assert 1 <= peer.port <= 65535


def _run_static(finder: StaticFinder, enough: Callable[[SightingRecorder], bool]) -> SightingRecorder:
    async def body() -> SightingRecorder:
        notebook = SightingRecorder()
        await finder.start(notebook)
        finder.watch(frozenset({OURS}))
        await until(lambda: enough(notebook))
        await asyncio.sleep(0.05)
        await finder.stop()
        return notebook

    return asyncio.run(body())


def test_static_finder_reports_peers_without_tag() -> None:
    names = {"nas.lan": ["192.0.2.8", "2001:db8::8"]}
    finder = StaticFinder(["192.0.2.7:9", "nas.lan"], 52416, resolve=names.__getitem__)
    assert _run_static(finder, lambda heard: len(heard.places()) >= 3).places() == {
        ("192.0.2.7", 9, UNTAGGED),
        ("192.0.2.8", 52416, UNTAGGED),
        ("2001:db8::8", 52416, UNTAGGED),
    }
    assert finder.health() is None


def test_static_finder_ignores_names_that_resolve_to_loopback() -> None:
    names = {"pc": ["127.0.1.1"], "mac": ["127.0.1.1", "::1", "192.0.2.9"], "localhost": ["127.0.0.1"]}
    finder = StaticFinder(list(names), 1, resolve=names.__getitem__)
    heard = _run_static(finder, lambda heard: len(heard.places()) >= 2 and finder.health() is not None)
    # A tunnel that a person dug ends at localhost: that name means what it says.
    assert heard.places() == {("192.0.2.9", 1, UNTAGGED), ("127.0.0.1", 1, UNTAGGED)}
    assert "pc (only this machine's own loopback)" in (finder.health() or "")


def test_static_finder_shows_unresolved_name_in_health() -> None:
    finder = StaticFinder(["surely-not-there.invalid", "192.0.2.7"], 1)
    assert ("192.0.2.7", 1, UNTAGGED) in _run_static(finder, lambda heard: bool(heard.places())).places()

    def missing(host: str) -> list[str]:
        raise OSError(2, "no such host")

    finder = StaticFinder(["gone"], 1, resolve=missing)
    assert _run_static(finder, lambda _: finder.health() is not None).sightings == []
    assert "gone (no such host)" in (finder.health() or "")


def test_static_finder_with_hanging_resolver_reports_other_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "_RESOLVE_S", 0.1)
    calls, end = [], threading.Event()

    def hang(host: str) -> list[str]:
        calls.append(host)
        end.wait(120)
        return ["192.0.2.1"]

    async def body() -> None:
        finder, heard = StaticFinder(["slow", "192.0.2.7"], 1, resolve=hang), SightingRecorder()
        await finder.start(heard)
        finder.watch(frozenset({OURS}))
        await until(lambda: finder.health() is not None)
        assert "no answer from the resolver" in (finder.health() or "")
        assert heard.places() == {("192.0.2.7", 1, UNTAGGED)}
        finder.refresh()
        await asyncio.sleep(0.2)
        await finder.stop()

    begin = time.monotonic()
    asyncio.run(body())
    assert time.monotonic() - begin < 60, "the hanging thread was waited for"
    end.set()
    assert calls == ["slow"], "one thread for one name, however often it is wanted"


def test_static_finder_without_search_reports_nothing() -> None:
    async def body() -> None:
        named, kept = (
            StaticFinder(["192.0.2.7"], 1),
            RememberedFinder([KnownAddress("aa", ("192.0.2.8",), 2)]),
        )
        heard = SightingRecorder()
        for finder in (named, kept):
            await finder.start(heard)
        await asyncio.sleep(0.1)
        assert heard.sightings == []
        for finder in (named, kept):
            finder.watch(frozenset({OURS}))
        await until(lambda: heard.places() == {("192.0.2.7", 1, UNTAGGED), ("192.0.2.8", 2, UNTAGGED)})
        for finder in (named, kept):
            await finder.stop()

    asyncio.run(body())
