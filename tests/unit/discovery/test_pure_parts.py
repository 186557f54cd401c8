"""What discovery decides without a network: tags, datagrams, pace, and which sightings are news."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.flow.backoff import Backoff
from barnraise.discovery import UNTAGGED, Sighting, namespace_tag
from barnraise.discovery.datagrams import DATAGRAM_BYTES, Datagram, decode_datagram, encode_datagram
from barnraise.discovery.finder import is_dialable, only_loopback
from barnraise.discovery.namespace import is_tag
from barnraise.discovery.search_schedule import SearchSchedule
from barnraise.discovery.sightings import SightingFilter

TAG = namespace_tag(b"s" * 32)
TAGS = st.binary(min_size=16, max_size=16).map(bytes.hex)


def test_a_tag_is_a_hash_of_purpose_and_secret() -> None:
    whole = hashlib.sha3_256(b"barnraise discovery namespace 1\0" + b"s" * 32).hexdigest()
    assert whole[:32] == TAG
    assert namespace_tag(b"t" * 32) != TAG
    assert is_tag(TAG)
    assert not any(map(is_tag, ("", TAG[:-1], TAG + "0", TAG.upper(), TAG[:-1] + "g", TAG[:-1] + "\n")))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["question", "answer"]), TAGS, st.integers(1, 65535))
def test_datagrams_come_back(kind: str, tag: str, port: int) -> None:
    datagram = Datagram(kind, tag, port)  # type: ignore[arg-type]
    data = encode_datagram(datagram)
    assert len(data) == DATAGRAM_BYTES
    assert decode_datagram(data) == datagram


def test_the_datagram_on_the_wire() -> None:
    data = encode_datagram(Datagram("question", "000102030405060708090a0b0c0d0e0f", 52416))
    assert data.hex() == "626b79640101000102030405060708090a0b0c0d0e0fccc0"


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64) | st.binary(max_size=20).map(lambda tail: b"bkyd\x01" + tail))
def test_any_bytes_are_a_datagram_or_nothing(data: bytes) -> None:
    datagram = decode_datagram(data)
    if datagram is not None:
        assert encode_datagram(datagram) == data
        assert datagram.port or datagram.kind == "question"


@pytest.mark.parametrize("place", [0, 4, 5])
def test_a_wrong_head_is_nothing(place: int) -> None:
    data = bytearray(encode_datagram(Datagram("answer", TAG, 1)))
    data[place] ^= 0x40
    assert decode_datagram(bytes(data)) is None
    assert decode_datagram(bytes(data) + b"x") is None


def test_a_search_waits_then_asks_with_back_off_and_rests_when_seen() -> None:
    searches = SearchSchedule(Backoff(5.0, 60.0), patience_s=5.0, forget_s=90.0)
    searches.want(frozenset({"x"}), 0.0)
    asked = [now for now in range(200) if searches.due(float(now))]
    assert asked == [5, 10, 20, 40, 80, 140]
    searches.seen("x", 200.0)
    searches.restart(201.0)
    assert searches.due(289.0) == []
    assert searches.due(290.0) == ["x"]
    searches.want(frozenset({"y"}), 300.0)
    assert searches.next_at() == 305.0
    searches.want(frozenset(), 300.0)
    assert searches.next_at() is None


def test_a_restart_asks_at_once_but_not_twice_in_a_second() -> None:
    searches = SearchSchedule(Backoff(5.0, 60.0))
    searches.want(frozenset({"x"}), 0.0)
    assert searches.due(0.0) == ["x"]
    searches.restart(0.1)
    searches.restart(0.2)
    assert searches.due(0.9) == []
    assert searches.due(1.0) == ["x"]


def _sighting(address: str = "192.0.2.1", port: int = 1, tag: str = TAG) -> Sighting:
    return Sighting(address, port, tag, "test")


def test_only_news_of_what_is_looked_for_is_let_through() -> None:
    places = SightingFilter()
    places.watch(frozenset({TAG}))
    assert places.admit(_sighting(), 0.0, (), 9)
    assert not places.admit(_sighting(), 1.9, (), 9)
    assert places.admit(_sighting(), 2.1, (), 9)
    assert places.admit(_sighting(port=2), 2.1, (), 9)
    assert places.admit(_sighting(tag=UNTAGGED), 2.1, (), 9)
    assert not places.admit(_sighting(tag=namespace_tag(b"o" * 32)), 2.1, (), 9)
    places.forget_repeats()
    assert places.admit(_sighting(), 2.2, (), 9)
    assert [sighting.port for sighting in places.all()].count(2) == 1
    places.watch(frozenset())
    assert {sighting.tag for sighting in places.all()} == {UNTAGGED}


def test_we_never_sight_ourselves() -> None:
    places = SightingFilter()
    places.watch(frozenset({TAG}))
    own = {"192.0.2.7", "2001:db8::7"}
    for address in (*own, "127.0.0.1", "127.0.1.1", "::1"):
        assert not places.admit(_sighting(address, 9), 0.0, own, 9)
    assert places.admit(_sighting("192.0.2.7", 10), 0.0, own, 9), "another agent of this machine"
    assert places.admit(_sighting("192.0.2.8", 9), 0.0, own, 9)


def test_a_flood_of_places_stays_bounded() -> None:
    places = SightingFilter()
    places.watch(frozenset({TAG}))
    count = 0
    for second in range(40):
        for number in range(200):
            count += places.admit(_sighting(f"10.{second}.0.{number}"), second + number / 1000, (), 9)
    assert count == 40 * 64
    assert len(places.all()) == 1024


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("192.168.1.7", True),
        ("100.64.1.2", True),
        ("169.254.3.4", True),
        ("2001:db8::7", True),
        ("fd00::7", True),
        ("127.0.0.1", False),
        ("127.0.1.1", False),
        ("::1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("224.0.0.251", False),
        ("255.255.255.255", False),
        ("fe80::1", False),
        ("::ffff:127.0.0.1", False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_which_addresses_from_the_network_may_be_dialled(address: str, fine: bool) -> None:
    assert is_dialable(address) is fine


def test_loopback_counts_where_there_is_nothing_else() -> None:
    assert only_loopback(["127.0.0.1"])
    assert not only_loopback(["127.0.0.1", "192.0.2.1"])
    assert is_dialable("127.0.0.1", loopback=True)
