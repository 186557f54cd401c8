"""Finder that reports earlier addresses of known machines while these are offline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from barnraise.core.flow.backoff import Backoff
from barnraise.core.flow.events import Wakeup
from barnraise.core.flow.supervised_task import cancel_task
from barnraise.discovery.finder import UNTAGGED, OnSighting, Sighting
from barnraise.discovery.search_schedule import SearchSchedule

_BACKOFF = Backoff(2.0, 60.0)
_MOST_NODES = 256
_MOST_ADDRESSES = 16
_IDLE_S = 3600.0


@dataclass(frozen=True)
class KnownAddress:
    """Address at which a node was reached before."""

    node: str
    addresses: tuple[str, ...]
    port: int


class RememberedFinder:
    """Finder that reports remembered addresses at the start, then with a backoff for each absent node."""

    name = "remembered"
    finds_strangers = False

    def __init__(self, places: Iterable[KnownAddress] = ()) -> None:
        self._places: dict[str, KnownAddress] = {}
        self._present: frozenset[str] = frozenset()
        self._watching = False
        self._searches = SearchSchedule(_BACKOFF)
        self._wakeup = Wakeup()
        self._task: asyncio.Task[None] | None = None
        self._on_sighting: OnSighting | None = None
        self.remember(places)

    def remember(self, places: Iterable[KnownAddress]) -> None:
        """Replace all remembered addresses, most useful first; drop those beyond the limit."""
        self._places = {}
        for place in places:
            if len(self._places) < _MOST_NODES:
                self._places[place.node] = KnownAddress(
                    place.node, place.addresses[:_MOST_ADDRESSES], place.port
                )
        self._look()

    def present(self, nodes: frozenset[str]) -> None:
        """Set the nodes that are online now; the others are searched."""
        self._present = nodes
        self._look()

    async def start(self, on_sighting: OnSighting) -> None:
        self._on_sighting = on_sighting
        self._task = asyncio.create_task(self._keep(), name="discovery remembered")

    def advertise(self, tags: frozenset[str], port: int) -> None:
        """Do nothing: other machines remember addresses themselves."""

    def watch(self, tags: frozenset[str]) -> None:
        self._watching = bool(tags)
        self._look()

    def refresh(self) -> None:
        self._searches.restart(time.monotonic())
        self._wakeup.wake()

    def seen(self, tag: str) -> None:
        """Do nothing: a tag does not say which node it is. `present` does."""

    async def stop(self) -> None:
        await cancel_task(self._task)
        self._task = None

    def health(self) -> str | None:
        return None

    def _look(self) -> None:
        away = frozenset(self._places) - self._present if self._watching else frozenset()
        self._searches.want(away, time.monotonic())
        self._wakeup.wake()

    async def _keep(self) -> None:
        while True:
            for node in self._searches.due(time.monotonic()):
                place = self._places[node]
                for address in place.addresses:
                    if self._on_sighting is not None:
                        self._on_sighting(Sighting(address, place.port, UNTAGGED, self.name))
            next_at = self._searches.next_at()
            await self._wakeup.sleep(_IDLE_S if next_at is None else next_at - time.monotonic())
