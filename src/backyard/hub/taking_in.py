"""Regions that take in who joins their parent: which of them say so, and which one a newcomer goes to. Pure.

A region repeats its offer; one that is silent is not named to anybody. Newcomers measure how far each is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from backyard.hub.messages import MOST_REGIONS, Offer, Role

REPEATED_S = 60.0
_LASTS_S = 3 * REPEATED_S
# A region takes work off its parent: so much farther away than the parent itself it may be.
DETOUR_S = 0.1

T = TypeVar("T")


class Standing(NamedTuple):
    offer: Offer
    until: float


Regions = Mapping[str, Standing]  # by their nodes


def with_offer(regions: Regions, node: str, offer: Offer, now: float) -> dict[str, Standing]:
    """The newest offers; those that lapsed are forgotten."""
    others = {one: known for one, known in regions.items() if known.until > now and one != node}
    return {node: Standing(offer, now + _LASTS_S), **others}


def open_to(regions: Regions, role: Role, now: float) -> tuple[str, ...]:
    """Invites of regions for a newcomer of this role; owners, mirrors and regions stay where they are."""
    standing = [known.offer for known in regions.values() if known.until > now][:MOST_REGIONS]
    if role == "friend":
        return tuple(offer.friend for offer in standing)
    if role == "stranger":
        return tuple(offer.stranger for offer in standing)
    return ()


def by_distance(own_s: float, reached: Sequence[tuple[T, float]]) -> list[tuple[T, float]]:
    """Regions with their round trips, those to be tried first; none that is much farther than the hub."""
    near = [one for one in reached if one[1] <= own_s + DETOUR_S]
    return sorted(near, key=lambda one: one[1])
