"""Assigns new members to regional hubs. Pure.

A region repeats its offer; a silent region is not offered to new members. New members measure the round trip
to each region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from barnraise.hub.protocol.messages import MOST_REGIONS, RegionOffer, Role

REPEATED_S = 60.0
_LASTS_S = 3 * REPEATED_S
# A region takes work off its parent: so much farther away than the parent itself it may be.
DETOUR_S = 0.1

T = TypeVar("T")


class RegionCapacity(NamedTuple):
    """Offer of a region. ``given``: the invite that each new member got, so that it gets only one."""

    offer: RegionOffer
    until: float
    given: Mapping[str, str]  # invite by member


Regions = Mapping[str, RegionCapacity]  # by their nodes


def add_offer(regions: Regions, node: str, offer: RegionOffer, now: float) -> dict[str, RegionCapacity]:
    """Add a region's offer and drop the expired ones."""
    given = regions[node].given if node in regions else {}
    others = {other: known for other, known in regions.items() if known.until > now and other != node}
    return {node: RegionCapacity(offer, now + _LASTS_S, given), **others}


def invites_for(regions: Regions, member: str, role: Role, now: float) -> tuple[Regions, tuple[str, ...]]:
    """Return one invite of each region for a new member. Owners, mirrors and regions get none."""
    if role not in ("friend", "stranger"):
        return regions, ()
    after, invites = dict(regions), list[str]()
    for node, known in regions.items():
        offered = known.offer.friends if role == "friend" else known.offer.strangers
        used = set(known.given.values())
        invite = known.given.get(member) or next(
            (candidate for candidate in offered if candidate not in used), None
        )
        if known.until > now and invite is not None and len(invites) < MOST_REGIONS:
            invites.append(invite)
            after[node] = known._replace(given={**known.given, member: invite})
    return after, tuple(invites)


def nearest_regions(own_s: float, reached: Sequence[tuple[T, float]]) -> list[tuple[T, float]]:
    """Return the regions by round trip, nearest first, without those that are much farther than the hub."""
    near = [region for region in reached if region[1] <= own_s + DETOUR_S]
    return sorted(near, key=lambda region: region[1])
