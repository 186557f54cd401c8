"""Persistent (copy-on-write) maps for the round state.

``map.put(key, value)`` returns a new map, and the old one keeps its content. All versions share one dict,
which is the newest version's. An older version stores how to undo the change, and does so if it is read
(Baker's trick). A hub reads only the newest version. So a change costs the same for any number of members;
with copies, a round of n members took n² steps. For one thread.
"""

from __future__ import annotations

import heapq
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import pairwise
from typing import Generic, Self, TypeVar

from barnraise.hub.rounds.leases import ActiveLease

K = TypeVar("K")
V = TypeVar("V")
_SPARE = 64  # outdated heap entries that are tolerated


class _SharedDict(Generic[K, V]):
    """Dict that all versions of a map share."""

    def __init__(self) -> None:
        self.all: dict[K, V] = {}

    def put(self, key: K, value: V | None) -> None:
        """Set a value; None removes the key."""
        if value is None:
            self.all.pop(key, None)
        else:
            self.all[key] = value


class PersistentMap(Mapping[K, V]):
    """Persistent map with copy-on-write semantics. Values are never None."""

    __slots__ = ("_newer", "_own", "_undo")

    def __init__(self, items: Mapping[K, V] | None = None) -> None:
        own = self._new_shared()
        for key, value in (items or {}).items():
            own.put(key, value)
        self._own: _SharedDict[K, V] | None = own
        self._newer: Self | None = None
        self._undo: tuple[K, V | None] | None = None

    def put(self, key: K, value: V) -> Self:
        """Return a map with this value."""
        return self._changed(key, value)

    def without(self, keys: Iterable[K]) -> Self:
        """Return a map without these keys."""
        result = self
        for key in keys:
            if key in result:
                result = result._changed(key, None)
        return result

    @staticmethod
    def _new_shared() -> _SharedDict[K, V]:
        return _SharedDict()

    def _changed(self, key: K, value: V | None) -> Self:
        own = self._newest()
        newer = object.__new__(type(self))
        newer._own, newer._newer, newer._undo = own, None, None
        self._own, self._newer, self._undo = None, newer, (key, own.all.get(key))
        own.put(key, value)
        return newer

    def _newest(self) -> _SharedDict[K, V]:
        """Return the shared dict with this version's content.

        The changes of newer versions are undone, and those versions store them.
        """
        if self._own is None:
            path = [self]
            while path[-1]._own is None:
                assert path[-1]._newer is not None
                path.append(path[-1]._newer)
            for newer, older in pairwise(reversed(path)):
                own = newer._own
                assert own is not None
                assert older._undo is not None
                key, value = older._undo
                newer._own, newer._newer, newer._undo = None, older, (key, own.all.get(key))
                own.put(key, value)
                older._own, older._newer, older._undo = own, None, None
        assert self._own is not None
        return self._own

    def __getitem__(self, key: K) -> V:
        return self._newest().all[key]

    def __contains__(self, key: object) -> bool:
        return key in self._newest().all

    def __iter__(self) -> Iterator[K]:
        return iter(self._newest().all)

    def __len__(self) -> int:
        return len(self._newest().all)

    def items(self) -> ItemsView[K, V]:
        return self._newest().all.items()

    def values(self) -> ValuesView[V]:
        return self._newest().all.values()


class _LeaseIndex(_SharedDict[str, ActiveLease]):
    """Shared dict of leases with heaps by deadline. The heaps may hold outdated entries."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}  # by node
        self.voids: list[tuple[float, str]] = []
        self.overdues: list[tuple[float, str]] = []
        self.expected: set[str] = set()  # not overdue at ``looked``
        self.looked = float("-inf")
        self._is_tidy = False  # nothing changed since

    def put(self, key: str, value: ActiveLease | None) -> None:
        before = self.all.get(key)
        self._is_tidy = False
        if before is not None:
            if self.names.get(before.node) == key:
                del self.names[before.node]
            self.expected.discard(key)
        super().put(key, value)
        if value is not None:
            self.names[value.node] = key
            heapq.heappush(self.voids, (value.void, key))
            heapq.heappush(self.overdues, (value.overdue, key))
            if value.overdue > self.looked:
                self.expected.add(key)
        if len(self.voids) > 4 * len(self.all) + _SPARE:
            self._rebuild(self.looked)

    def advance(self, now: float) -> None:
        """Remove overdue and outdated leases from the tops of the heaps."""
        if now == self.looked and self._is_tidy:
            return
        if now < self.looked:
            self._rebuild(now)
        self.looked, self._is_tidy = now, True
        while self.overdues:
            moment, key = self.overdues[0]
            is_outdated = key not in self.expected or self.all[key].overdue != moment
            if not is_outdated and moment > now:
                break
            heapq.heappop(self.overdues)
            if not is_outdated:
                self.expected.discard(key)
        while self.voids and not self._is_void(*self.voids[0]):
            heapq.heappop(self.voids)

    def expired(self, now: float) -> list[ActiveLease]:
        """Return the void leases; they stay in the index until they are removed."""
        void_leases: dict[str, ActiveLease] = {}
        self.advance(now)
        while self.voids and self.voids[0][0] <= now:
            moment, key = heapq.heappop(self.voids)
            if self._is_void(moment, key):
                void_leases[key] = self.all[key]
        for key, lease in void_leases.items():  # they stay until they are removed
            heapq.heappush(self.voids, (lease.void, key))
        return list(void_leases.values())

    def _is_void(self, moment: float, key: str) -> bool:
        return key in self.all and self.all[key].void == moment

    def _rebuild(self, now: float) -> None:
        self.voids = [(lease.void, key) for key, lease in self.all.items()]
        self.expected = {key for key, lease in self.all.items() if lease.overdue > now}
        self.overdues = [(self.all[key].overdue, key) for key in self.expected]
        heapq.heapify(self.voids)
        heapq.heapify(self.overdues)


class LeaseTable(PersistentMap[str, ActiveLease]):
    """Leases by id, at most one per member."""

    __slots__ = ()

    @staticmethod
    def _new_shared() -> _LeaseIndex:
        return _LeaseIndex()

    def _leases(self) -> _LeaseIndex:
        own = self._newest()
        assert isinstance(own, _LeaseIndex)
        return own

    def of_member(self, node: str) -> ActiveLease | None:
        """Return the lease of a member, or None."""
        own = self._leases()
        name = own.names.get(node)
        return None if name is None else own.all[name]

    def expired(self, now: float) -> list[ActiveLease]:
        """Return the void leases, whose samples return to the pool."""
        return self._leases().expired(now)

    def expected(self, now: float) -> int:
        """Return the number of leases that are not overdue."""
        own = self._leases()
        own.advance(now)
        return len(own.expected)

    def next_deadline(self, now: float) -> float | None:
        """Return the next time at which a lease is overdue or void; None if there is none."""
        own = self._leases()
        own.advance(now)
        return min((heap[0][0] for heap in (own.overdues, own.voids) if heap), default=None)
