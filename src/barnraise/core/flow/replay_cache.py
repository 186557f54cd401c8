"""Replay cache: the keys of messages that were accepted lately. Pure: the time is passed in."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from enum import Enum, auto
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class KeyCheck(Enum):
    """Result of a look into the replay cache."""

    NEW = auto()
    REPLAY = auto()
    FULL = auto()


class ReplayCache(Generic[Key]):
    """Bounded memory of keys that must not count twice.

    ``ttl_s``: seconds for which a key is remembered; None for as long as there is space.
    ``evict_when_full``: True to forget the oldest key, which may let an old replay pass. False to reject the
    new key, so that no replay passes within ``ttl_s``.
    """

    def __init__(self, capacity: int, *, ttl_s: float | None = None, evict_when_full: bool) -> None:
        self._capacity, self._ttl_s = capacity, ttl_s
        self._evict_when_full = evict_when_full
        # The time and the sender of each key, the oldest key first.
        self._added: OrderedDict[Key, tuple[float, Hashable]] = OrderedDict()
        self._counts = Counter[Hashable]()

    def add(self, key: Key, now: float = 0.0, sender: Hashable = None) -> KeyCheck:
        """Remember a key that is new; ``now`` matters only with ``ttl_s`` and never goes back.

        ``sender``: the sender whose keys `count_of` counts.
        """
        self._expire(now)
        if key in self._added:
            return KeyCheck.REPLAY
        if len(self._added) >= self._capacity:
            if not self._evict_when_full:
                return KeyCheck.FULL
            self._forget_oldest()
        self._added[key] = now, sender
        self._counts[sender] += 1
        return KeyCheck.NEW

    def count_of(self, sender: Hashable, now: float = 0.0) -> int:
        """Return the number of keys of a sender that are remembered."""
        self._expire(now)
        return self._counts[sender]

    def __len__(self) -> int:
        return len(self._added)

    def _expire(self, now: float) -> None:
        if self._ttl_s is None:
            return
        while self._added and now - next(iter(self._added.values()))[0] > self._ttl_s:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, (_, sender) = self._added.popitem(last=False)
        self._counts[sender] -= 1
        if not self._counts[sender]:
            del self._counts[sender]
