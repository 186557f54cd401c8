"""Pending connections, which are not identified yet: limited in total and per source. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Guest = TypeVar("Guest", bound=Hashable)


class PendingConnections(Generic[Guest]):
    """Table of pending connections. If it is full, the oldest is evicted for the newest."""

    def __init__(self, *, total: int, per_source: int) -> None:
        self._total = total
        self._per_source = per_source
        self._sources: dict[Guest, str] = {}  # oldest first
        self._guests: dict[str, dict[Guest, None]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, guest: Guest) -> bool:
        return guest in self._sources

    def oldest_in_the_way(self, source: str) -> Guest | None:
        """Return the connection to evict before one more of this source may enter, or None."""
        of_source = self._guests.get(source, {})
        if len(of_source) >= self._per_source:
            return next(iter(of_source))
        if len(self._sources) >= self._total:
            return next(iter(self._sources))
        return None

    def enter(self, guest: Guest, source: str) -> None:
        self._sources[guest] = source
        self._guests.setdefault(source, {})[guest] = None

    def leave(self, guest: Guest) -> None:
        source = self._sources.pop(guest, None)
        if source is not None:
            of_source = self._guests[source]
            del of_source[guest]
            if not of_source:
                del self._guests[source]

    def everyone(self) -> list[Guest]:
        return list(self._sources)
