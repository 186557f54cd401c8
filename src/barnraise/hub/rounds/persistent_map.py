"""Maps that pure decisions change without copying them.

``book.put(key, value)`` gives a new book, and the old one stays what it was. All versions share one dict,
which is the newest's; an older one remembers what to undo, and does so if it is read after all (Baker's
trick). A hub uses the newest only, so a change costs the same however many members it has, while with copies
a round of n members took n² steps. For one thread.
"""

from __future__ import annotations

import heapq
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import pairwise
from typing import Generic, Self, TypeVar

from barnraise.hub.rounds.leases import ActiveLease

K = TypeVar("K")
V = TypeVar("V")
_SPARE = 64  # outdated entries of a heap that nobody minds


class _SharedDict(Generic[K, V]):
    """What all versions of a book share."""

    def __init__(self) -> None:
        self.all: dict[K, V] = {}

    def put(self, key: K, value: V | None) -> None:
        """None takes it away."""
        if value is None:
            self.all.pop(key, None)
        else:
            self.all[key] = value


class PersistentMap(Mapping[K, V]):
    """No value is None."""

    __slots__ = ("_newer", "_own", "_undo")

    def __init__(self, items: Mapping[K, V] | None = None) -> None:
        own = self._shelf()
        for key, value in (items or {}).items():
            own.put(key, value)
        self._own: _SharedDict[K, V] | None = own
        self._newer: Self | None = None
        self._undo: tuple[K, V | None] | None = None

    def put(self, key: K, value: V) -> Self:
        return self._changed(key, value)

    def without(self, keys: Iterable[K]) -> Self:
        found = self
        for key in keys:
            if key in found:
                found = found._changed(key, None)
        return found

    @staticmethod
    def _shelf() -> _SharedDict[K, V]:
        return _SharedDict()

    def _changed(self, key: K, value: V | None) -> Self:
        own = self._newest()
        newer = object.__new__(type(self))
        newer._own, newer._newer, newer._undo = own, None, None
        self._own, self._newer, self._undo = None, newer, (key, own.all.get(key))
        own.put(key, value)
        return newer

    def _newest(self) -> _SharedDict[K, V]:
        """The shelf, as this version has it: what newer ones changed is undone, and remembered by them."""
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
    """With the leases in the order of their moments. Heaps may hold outdated entries."""

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
            self._sort_anew(self.looked)

    def look(self, now: float) -> None:
        """Who is overdue by now, and what is outdated, leaves the heaps' tops."""
        if now == self.looked and self._is_tidy:
            return
        if now < self.looked:
            self._sort_anew(now)
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
        found: dict[str, ActiveLease] = {}
        self.look(now)
        while self.voids and self.voids[0][0] <= now:
            moment, key = heapq.heappop(self.voids)
            if self._is_void(moment, key):
                found[key] = self.all[key]
        for key, lease in found.items():  # they are lent until somebody takes them away
            heapq.heappush(self.voids, (lease.void, key))
        return list(found.values())

    def _is_void(self, moment: float, key: str) -> bool:
        return key in self.all and self.all[key].void == moment

    def _sort_anew(self, now: float) -> None:
        self.voids = [(one.void, key) for key, one in self.all.items()]
        self.expected = {key for key, one in self.all.items() if one.overdue > now}
        self.overdues = [(self.all[key].overdue, key) for key in self.expected]
        heapq.heapify(self.voids)
        heapq.heapify(self.overdues)


class LeaseTable(PersistentMap[str, ActiveLease]):
    """The leases that are out, by their names: one of each member."""

    __slots__ = ()

    @staticmethod
    def _shelf() -> _LeaseIndex:
        return _LeaseIndex()

    def _leases(self) -> _LeaseIndex:
        own = self._newest()
        assert isinstance(own, _LeaseIndex)
        return own

    def of(self, node: str) -> ActiveLease | None:
        own = self._leases()
        name = own.names.get(node)
        return None if name is None else own.all[name]

    def expired(self, now: float) -> list[ActiveLease]:
        """Whose spans return."""
        return self._leases().expired(now)

    def expected(self, now: float) -> int:
        """How many are not overdue."""
        own = self._leases()
        own.look(now)
        return len(own.expected)

    def next_moment(self, now: float) -> float | None:
        """The next one at which something is overdue or void."""
        own = self._leases()
        own.look(now)
        return min((heap[0][0] for heap in (own.overdues, own.voids) if heap), default=None)
