"""Records that a person removed, on any owner's machine: kept on disk, and exchanged with the logs.

A machine that was off during a removal learns of it before it copies logs, and others know not to copy its
logs. There is no agreement, because a removal is never taken back. Only the newest ones are remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from barnraise.history.logs.retention import RemovedRecord, newest_removals, removals_digest


class RemovalStorage(Protocol):
    """Storage of removals that survives a power cut."""

    def removals(self) -> list[tuple[float, str]]:
        """Return the stored removals: their times and the runs."""

    def keep_removals(self, removals: Iterable[tuple[float, str]]) -> None:
        """Replace the stored removals."""


class RemovedRecords:
    """Removals that this machine knows. ``times``: by run; ``digest``: differs if another knows others."""

    def __init__(self, storage: RemovalStorage) -> None:
        self._storage = storage
        self.all: tuple[RemovedRecord, ...] = ()
        self.times: Mapping[str, float] = {}
        self._set(newest_removals(RemovedRecord(*stored) for stored in storage.removals()))

    def add(self, removals: Iterable[RemovedRecord]) -> bool:
        """Add removals, and store them; return False if all were known or are too old to be remembered."""
        newest = newest_removals((*self.all, *removals))
        if newest == self.all:
            return False
        self._storage.keep_removals([(item.at, item.run) for item in newest])
        self._set(newest)
        return True

    def reset(self) -> None:
        """Forget the removals of the old cluster."""
        self._set(())

    def _set(self, removals: tuple[RemovedRecord, ...]) -> None:
        self.all = removals
        self.times = {item.run: item.at for item in removals}
        self.digest = removals_digest(removals)
