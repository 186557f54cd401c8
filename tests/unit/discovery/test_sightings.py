"""Filter of sightings."""

from __future__ import annotations

from barnraise.discovery import UNTAGGED, Sighting, namespace_tag
from barnraise.discovery.sightings import SightingFilter

TAG = namespace_tag(b"s" * 32)


def _sighting(address: str = "192.0.2.1", port: int = 1, tag: str = TAG) -> Sighting:
    return Sighting(address, port, tag, "test")


def test_sighting_filter_passes_new_sightings_of_searched_tags() -> None:
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


def test_sighting_filter_drops_own_addresses() -> None:
    places = SightingFilter()
    places.watch(frozenset({TAG}))
    own = {"192.0.2.7", "2001:db8::7"}
    for address in (*own, "127.0.0.1", "127.0.1.1", "::1"):
        assert not places.admit(_sighting(address, 9), 0.0, own, 9)
    assert places.admit(_sighting("192.0.2.7", 10), 0.0, own, 9), "another agent of this machine"
    assert places.admit(_sighting("192.0.2.8", 9), 0.0, own, 9)


def test_sighting_filter_under_flood_stays_bounded() -> None:
    places = SightingFilter()
    places.watch(frozenset({TAG}))
    count = 0
    for second in range(40):
        for number in range(200):
            count += places.admit(_sighting(f"10.{second}.0.{number}"), second + number / 1000, (), 9)
    assert count == 40 * 64
    assert len(places.all()) == 1024
