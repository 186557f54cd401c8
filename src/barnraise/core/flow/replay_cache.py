"""Replay cache: the keys of messages that were accepted lately. Pure: the time is passed in."""

from __future__ import annotations

from collections import OrderedDict
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
        self._added: OrderedDict[Key, float] = OrderedDict()  # the oldest key first

    def add(self, key: Key, now: float = 0.0) -> KeyCheck:
        """Remember a key that is new; ``now`` matters only with ``ttl_s`` and never goes back."""
        self._expire(now)
        if key in self._added:
            return KeyCheck.REPLAY
        if len(self._added) >= self._capacity:
            if not self._evict_when_full:
                return KeyCheck.FULL
            self._added.popitem(last=False)
        self._added[key] = now
        return KeyCheck.NEW

    def __len__(self) -> int:
        return len(self._added)

    def _expire(self, now: float) -> None:
        if self._ttl_s is None:
            return
        while self._added and now - next(iter(self._added.values())) > self._ttl_s:
            self._added.popitem(last=False)
