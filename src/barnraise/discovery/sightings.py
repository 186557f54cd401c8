"""Filter of sightings: only new ones pass. Pure, with bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from barnraise.discovery.finder import UNTAGGED, Sighting

_REPEAT_S = 2.0
_MOST_PLACES = 1024
_MOST_PER_SECOND = 64
_LOOPBACK = ("127.", "::1")


@dataclass
class _Second:
    began: float
    count: int = 0


class SightingFilter:
    """Filter that remembers recent sightings and passes new ones."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, int, str], tuple[float, Sighting]] = OrderedDict()
        self._seconds: dict[str, _Second] = {}
        self._watched: frozenset[str] = frozenset()

    def watch(self, tags: frozenset[str]) -> None:
        self._watched = tags
        for tag in self._seconds.keys() - tags - {UNTAGGED}:
            del self._seconds[tag]
        for key in [key for key in self._seen if key[2] not in tags and key[2] != UNTAGGED]:
            del self._seen[key]

    def forget_repeats(self) -> None:
        """Treat the next sighting of each address as new again."""
        for key, (_, sighting) in self._seen.items():
            self._seen[key] = (float("-inf"), sighting)

    def admit(self, sighting: Sighting, now: float, own: Collection[str], own_port: int) -> bool:
        """Return True if the sighting is new, searched for, not this machine, and within the rate limit."""
        if sighting.tag != UNTAGGED and sighting.tag not in self._watched:
            return False
        if sighting.port == own_port and (sighting.address in own or sighting.address.startswith(_LOOPBACK)):
            return False
        key = (sighting.address, sighting.port, sighting.tag)
        last = self._seen.get(key)
        if last is not None and now - last[0] < _REPEAT_S:
            return False
        second = self._seconds.get(sighting.tag)
        if second is None or now - second.began >= 1.0:
            second = self._seconds[sighting.tag] = _Second(now)
        if second.count >= _MOST_PER_SECOND:
            return False
        second.count += 1
        self._seen[key] = (now, sighting)
        self._seen.move_to_end(key)
        while len(self._seen) > _MOST_PLACES:
            self._seen.popitem(last=False)
        return True

    def all(self) -> tuple[Sighting, ...]:
        """Return the sightings that passed, oldest first."""
        return tuple(sighting for _, sighting in self._seen.values())
