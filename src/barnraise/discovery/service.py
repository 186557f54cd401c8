"""Service that runs every finder and passes on new sightings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from barnraise.core.errors import DiscoveryError
from barnraise.discovery.finder import Finder, OnSighting, Sighting
from barnraise.discovery.sightings import SightingFilter
from barnraise.transport.addresses import own_addresses

_OWN_S = 5.0

_log = logging.getLogger(__name__)


class Discovery:
    """All finders as one. A finder that fails does not stop the others."""

    def __init__(
        self, finders: Sequence[Finder], *, addresses: Callable[[], list[str]] = own_addresses
    ) -> None:
        self._finders = tuple(finders)
        self._addresses = addresses
        self._places = SightingFilter()
        self._on_sighting: OnSighting | None = None
        self._port = 0
        self._own: frozenset[str] = frozenset()
        self._own_at = float("-inf")
        self._failed: dict[str, str] = {}

    async def start(self, on_sighting: OnSighting) -> None:
        """Start to search and to be found. The callback runs on the event loop and must be quick."""
        self._on_sighting = on_sighting
        for finder in self._finders:
            try:
                await finder.start(self._sighted)
            except Exception as error:  # noqa: BLE001 - one way that is broken must not close the others
                self._failed[finder.name] = f"it could not be started: {error}"
                _log.warning("discovery by %s could not be started: %s", finder.name, error)

    def advertise(self, tags: frozenset[str], port: int) -> None:
        """Set the tags under which this machine can be found, at this port."""
        self._port = port
        for finder in self._finders:
            finder.advertise(tags, port)

    def watch(self, tags: frozenset[str]) -> None:
        """Set the tags to search for."""
        self._places.watch(tags)
        for finder in self._finders:
            finder.watch(tags)

    def refresh(self) -> None:
        """Search again at once, and report known sightings again."""
        self._places.forget_repeats()
        for finder in self._finders:
            finder.refresh()

    async def stop(self) -> None:
        self._on_sighting = None
        ends = await asyncio.gather(*(finder.stop() for finder in self._finders), return_exceptions=True)
        for finder, end in zip(self._finders, ends, strict=True):
            if isinstance(end, Exception):
                _log.warning("discovery by %s did not stop cleanly: %s", finder.name, end)

    def health(self) -> dict[str, str | None]:
        """Return for each finder None, or a sentence with the reason why it does not work."""
        return {finder.name: self._failed.get(finder.name) or finder.health() for finder in self._finders}

    def check(self) -> None:
        """Raise DiscoveryError if no finder of unknown machines works now."""
        health = self.health()
        strangers = [finder.name for finder in self._finders if finder.finds_strangers]
        if not any(health[name] is None for name in strangers):
            reasons = "; ".join(f"{name}: {health[name]}" for name in strangers) or "none is set up"
            raise DiscoveryError(f"no way to look for other machines works here ({reasons})")

    def sightings(self) -> tuple[Sighting, ...]:
        """Return recent sightings, oldest first."""
        return self._places.all()

    def _sighted(self, sighting: Sighting) -> None:
        if self._on_sighting is None:
            return
        now = time.monotonic()
        if now - self._own_at > _OWN_S:
            self._own, self._own_at = frozenset(self._addresses()), now
        if not self._places.admit(sighting, now, self._own, self._port):
            return
        if sighting.tag:
            for finder in self._finders:
                finder.seen(sighting.tag)
        _log.debug("%s sighted %s port %d", sighting.source, sighting.address, sighting.port)
        self._on_sighting(sighting)
