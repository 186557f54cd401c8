"""Finder that reports earlier addresses of known machines while these are offline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from barnraise.core.flow.backoff import Backoff
from barnraise.discovery.known_addresses import KnownAddressFinder

_BACKOFF = Backoff(2.0, 60.0)
_MOST_NODES = 256
_MOST_ADDRESSES = 16


@dataclass(frozen=True)
class KnownAddress:
    """Address at which a node was reached before."""

    node: str
    addresses: tuple[str, ...]
    port: int


class RememberedFinder(KnownAddressFinder):
    """Finder that reports remembered addresses at the start, then with a backoff for each absent node."""

    def __init__(self, places: Iterable[KnownAddress] = ()) -> None:
        super().__init__("remembered", _BACKOFF)
        self._places: dict[str, KnownAddress] = {}
        self._present: frozenset[str] = frozenset()
        self._watching = False
        self.remember(places)

    def remember(self, places: Iterable[KnownAddress]) -> None:
        """Replace all remembered addresses, most useful first; drop those beyond the limit."""
        self._places = {}
        for place in places:
            if len(self._places) < _MOST_NODES:
                self._places[place.node] = KnownAddress(
                    place.node, place.addresses[:_MOST_ADDRESSES], place.port
                )
        self._search_absent()

    def present(self, nodes: frozenset[str]) -> None:
        """Set the nodes that are online now; the others are searched."""
        self._present = nodes
        self._search_absent()

    def watch(self, tags: frozenset[str]) -> None:
        self._watching = bool(tags)
        self._search_absent()

    def _search_absent(self) -> None:
        self._search(frozenset(self._places) - self._present if self._watching else frozenset())

    async def _report_due(self, keys: list[str]) -> None:
        for node in keys:
            self._report(self._places[node].addresses, self._places[node].port)
