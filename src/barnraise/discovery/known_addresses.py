"""Base class of finders that report addresses known beforehand, from the settings or from memory."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable

from barnraise.core.flow.backoff import Backoff
from barnraise.core.flow.events import Wakeup
from barnraise.core.flow.supervised_task import cancel_task
from barnraise.discovery.finder import UNTAGGED, OnSighting, Sighting
from barnraise.discovery.search_schedule import SearchSchedule

_IDLE_S = 3600.0


class KnownAddressFinder(ABC):
    """Finder that reports known addresses at the start of a search, then with a backoff.

    It sends nothing to the network. A subclass chooses the searches and reports the addresses of each.
    """

    finds_strangers = False

    def __init__(self, name: str, backoff: Backoff) -> None:
        self.name = name
        self._searches = SearchSchedule(backoff)
        self._wakeup = Wakeup()
        self._task: asyncio.Task[None] | None = None
        self._on_sighting: OnSighting | None = None

    async def start(self, on_sighting: OnSighting) -> None:
        self._on_sighting = on_sighting
        self._task = asyncio.create_task(self._keep(), name=f"discovery {self.name}")

    def advertise(self, tags: frozenset[str], port: int) -> None:
        """Do nothing: other machines have settings and a memory of their own."""
        return

    def refresh(self) -> None:
        self._searches.restart(time.monotonic())
        self._wakeup.wake()

    def seen(self, tag: str) -> None:
        """Do nothing: a tag does not say which of the known machines shows it."""
        return

    async def stop(self) -> None:
        await cancel_task(self._task)
        self._task = None

    def health(self) -> str | None:
        return None

    def _search(self, keys: frozenset[str]) -> None:
        """Search exactly these keys from now on."""
        self._searches.want(keys, time.monotonic())
        self._wakeup.wake()

    @abstractmethod
    async def _report_due(self, keys: list[str]) -> None:
        """Report the addresses of the searches that are due."""

    def _report(self, addresses: Iterable[str], port: int) -> None:
        if self._on_sighting is not None:
            for address in addresses:
                self._on_sighting(Sighting(address, port, UNTAGGED, self.name))

    async def _keep(self) -> None:
        while True:
            if due := self._searches.due(time.monotonic()):
                await self._report_due(due)
            next_at = self._searches.next_at()
            await self._wakeup.sleep(_IDLE_S if next_at is None else next_at - time.monotonic())
