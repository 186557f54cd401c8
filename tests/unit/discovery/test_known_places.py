"""Places that a person named, and places that were remembered."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import ConfigError
from barnraise.core.flow.backoff import Backoff
from barnraise.discovery import UNTAGGED, remembered, static
from barnraise.discovery.remembered import KnownAddress, RememberedFinder
from barnraise.discovery.static import StaticFinder, StaticPeer, parse_peer
from tests.unit.discovery.ways import OURS, Notebook, until


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
def test_what_a_person_may_write(text: str, peer: StaticPeer) -> None:
    assert parse_peer(text, 52416) == peer


NO_MACHINES = (
    *("", " ", "nas:", "nas:0", "nas:65536", "nas:-1", "nas:x", "nas:٣", "[2001:db8::7", "[2001:db8::7]9"),
    *("http://nas", "a b", "me@nas", "1:2:3", "127.0.1.1", "127.0.1.1:52416", "n" * 300),
)


@pytest.mark.parametrize("text", NO_MACHINES)
def test_what_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.peers"):
        parse_peer(text, 52416)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_peer_or_a_config_error(text: str) -> None:
    try:
        peer = parse_peer(text, 52416)
    except ConfigError:
        return
    assert peer.host
    assert 1 <= peer.port <= 65535


def _run_static(finder: StaticFinder, enough: Callable[[Notebook], bool]) -> Notebook:
    async def body() -> Notebook:
        notebook = Notebook()
        await finder.start(notebook)
        finder.watch(frozenset({OURS}))
        await until(lambda: enough(notebook))
        await asyncio.sleep(0.05)
        await finder.stop()
        return notebook

    return asyncio.run(body())


def test_named_places_are_given_out_without_a_tag() -> None:
    names = {"nas.lan": ["192.0.2.8", "2001:db8::8"]}
    finder = StaticFinder(["192.0.2.7:9", "nas.lan"], 52416, resolve=names.__getitem__)
    assert _run_static(finder, lambda heard: len(heard.places()) >= 3).places() == {
        ("192.0.2.7", 9, UNTAGGED),
        ("192.0.2.8", 52416, UNTAGGED),
        ("2001:db8::8", 52416, UNTAGGED),
    }
    assert finder.health() is None


def test_a_name_never_becomes_this_machines_own_loopback() -> None:
    names = {"pc": ["127.0.1.1"], "mac": ["127.0.1.1", "::1", "192.0.2.9"], "localhost": ["127.0.0.1"]}
    finder = StaticFinder(list(names), 1, resolve=names.__getitem__)
    heard = _run_static(finder, lambda heard: len(heard.places()) >= 2 and finder.health() is not None)
    # A tunnel that a person dug ends at localhost: that name means what it says.
    assert heard.places() == {("192.0.2.9", 1, UNTAGGED), ("127.0.0.1", 1, UNTAGGED)}
    assert "pc (only this machine's own loopback)" in (finder.health() or "")


def test_a_name_that_does_not_resolve_is_shown() -> None:
    finder = StaticFinder(["surely-not-there.invalid", "192.0.2.7"], 1)
    assert ("192.0.2.7", 1, UNTAGGED) in _run_static(finder, lambda heard: bool(heard.places())).places()

    def missing(host: str) -> list[str]:
        raise OSError(2, "no such host")

    finder = StaticFinder(["gone"], 1, resolve=missing)
    assert _run_static(finder, lambda _: finder.health() is not None).sightings == []
    assert "gone (no such host)" in (finder.health() or "")


def test_a_resolver_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "_RESOLVE_S", 0.1)
    calls, end = [], threading.Event()

    def hang(host: str) -> list[str]:
        calls.append(host)
        end.wait(120)
        return ["192.0.2.1"]

    async def body() -> None:
        finder, heard = StaticFinder(["slow", "192.0.2.7"], 1, resolve=hang), Notebook()
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


def test_nothing_is_given_out_while_nobody_looks() -> None:
    async def body() -> None:
        named, kept = (
            StaticFinder(["192.0.2.7"], 1),
            RememberedFinder([KnownAddress("aa", ("192.0.2.8",), 2)]),
        )
        heard = Notebook()
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


def test_remembered_places_are_tried_while_their_node_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_BACKOFF", Backoff(0.2, 60.0))

    async def body() -> None:
        finder, heard = RememberedFinder(), Notebook()
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


def test_memory_is_bounded() -> None:
    many = [
        KnownAddress(f"{number:04x}", tuple(f"10.0.0.{n}" for n in range(200)), 1) for number in range(1000)
    ]
    finder = RememberedFinder(many)
    assert len(finder._places) == 256
    assert all(len(place.addresses) == 16 for place in finder._places.values())
    with pytest.raises(ConfigError, match="more than"):
        StaticFinder([f"h{number}" for number in range(300)], 1)
