"""How often to ask, and how often to answer. Pure: the time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

_SHORTEST_S = 1.0


@dataclass(frozen=True)
class Backoff:
    """Waits that double from ``first_s`` to ``last_s``."""

    first_s: float
    last_s: float

    def wait(self, attempt: int) -> float:
        """Seconds to wait after attempt number ``attempt``, counted from 0."""
        return float(min(self.last_s, self.first_s * 2 ** min(attempt, 32)))


@dataclass
class _Bucket:
    tokens: float
    at: float


class SourceRateLimit:
    """So many per second to each source and to all together, with a burst. Its memory is bounded."""

    def __init__(self, per_source: float, in_total: float, *, burst: float = 4.0, sources: int = 256) -> None:
        self._per_source = per_source
        self._in_total = in_total
        self._burst = burst
        self._most = sources
        self._all: _Bucket | None = None
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()

    def take(self, source: Hashable, now: float) -> bool:
        """Whether one more is allowed for this source now; if so, it is counted."""
        if self._all is None:
            self._all = _Bucket(self._burst * 4, now)
        bucket = self._buckets.pop(source, None) or _Bucket(self._burst, now)
        self._buckets[source] = bucket
        while len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        _fill(bucket, self._per_source, self._burst, now)
        _fill(self._all, self._in_total, self._burst * 4, now)
        if bucket.tokens < 1 or self._all.tokens < 1:
            return False
        bucket.tokens -= 1
        self._all.tokens -= 1
        return True


def _fill(bucket: _Bucket, rate: float, most: float, now: float) -> None:
    bucket.tokens = min(most, bucket.tokens + max(0.0, now - bucket.at) * rate)
    bucket.at = now


@dataclass
class _Search:
    next_at: float
    attempt: int = 0
    asked_at: float = float("-inf")
    rests_until: float = float("-inf")


class SearchSchedule:
    """For each thing that is looked for: when to ask for it next.

    The first question comes ``patience_s`` after the search began, the next ones with a back-off. Once the
    thing was seen, there is no question until it has not been seen again for ``forget_s``.
    """

    def __init__(self, backoff: Backoff, *, patience_s: float = 0.0, forget_s: float | None = None) -> None:
        self._backoff = backoff
        self._patience_s = patience_s
        self._forget_s = forget_s
        self._searches: dict[str, _Search] = {}

    def want(self, keys: frozenset[str], now: float) -> None:
        """Look for exactly these; a search that goes on keeps its pace."""
        for gone in self._searches.keys() - keys:
            del self._searches[gone]
        for key in keys - self._searches.keys():
            self._searches[key] = _Search(now + self._patience_s)

    def restart(self, now: float) -> None:
        """Ask at once for what is not seen, but not twice in a second; then as in the beginning."""
        for search in self._searches.values():
            if search.rests_until <= now:
                search.attempt, search.next_at = 0, max(now, search.asked_at + _SHORTEST_S)

    def seen(self, key: str, now: float) -> None:
        search = self._searches.get(key)
        if search is not None and self._forget_s is not None:
            search.attempt, search.next_at = 0, now + self._forget_s
            search.rests_until = search.next_at

    def due(self, now: float) -> list[str]:
        """What to ask for now; each is counted as asked."""
        keys = sorted(key for key, search in self._searches.items() if search.next_at <= now)
        for key in keys:
            search = self._searches[key]
            search.next_at = now + self._backoff.wait(search.attempt)
            search.attempt += 1
            search.asked_at = now
        return keys

    def next_at(self) -> float | None:
        return min((search.next_at for search in self._searches.values()), default=None)
