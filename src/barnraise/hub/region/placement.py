"""Assigns new members to regional hubs. Pure.

A region repeats its offer; a silent region is not offered to new members. New members measure the round trip
to each region, and take a seat at one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from barnraise.hub.protocol.messages import MOST_REGIONS, RegionOffer, RegionPlace

REPEATED_S = 60.0
_LASTS_S = 3 * REPEATED_S
# A region takes work off its parent: so much farther away than the parent itself it may be.
DETOUR_S = 0.1

T = TypeVar("T")


class RegionCapacity(NamedTuple):
    """Offer of a region, and the number of its seats that are left."""

    offer: RegionOffer
    until: float
    seats: int


Regions = Mapping[str, RegionCapacity]  # by their nodes, which are their hubs' ids, too


def add_offer(regions: Regions, node: str, offer: RegionOffer, now: float) -> dict[str, RegionCapacity]:
    """Add a region's offer and drop the expired ones."""
    others = {other: known for other, known in regions.items() if known.until > now and other != node}
    return {node: RegionCapacity(offer, now + _LASTS_S, offer.seats), **others}


def open_regions(regions: Regions, now: float) -> tuple[RegionPlace, ...]:
    """Return the regions that have a seat left."""
    places = [
        RegionPlace(hub=node, addresses=known.offer.addresses, pinned=known.offer.pinned)
        for node, known in regions.items()
        if known.until > now and known.seats > 0
    ]
    return tuple(places[:MOST_REGIONS])


def take_seat(regions: Regions, node: str, now: float) -> dict[str, RegionCapacity] | None:
    """Return the regions after one seat of a region was taken; None if it has none left."""
    known = regions.get(node)
    if known is None or known.until <= now or known.seats < 1:
        return None
    return {**regions, node: known._replace(seats=known.seats - 1)}


def nearest_regions(own_s: float, reached: Sequence[tuple[T, float]]) -> list[tuple[T, float]]:
    """Return the regions by round trip, nearest first, without those that are much farther than the hub."""
    near = [region for region in reached if region[1] <= own_s + DETOUR_S]
    return sorted(near, key=lambda region: region[1])
