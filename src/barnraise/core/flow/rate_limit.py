"""Token-bucket rate limit, per source and optionally in total. Pure: the time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class _Bucket:
    """Tokens that refill at a rate, up to a burst."""

    __slots__ = ("burst", "rate", "tokens", "updated")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self.tokens, self.updated = burst, now

    def refill(self, now: float) -> None:
        """Add the tokens of the time since the last refill."""
        self.tokens = min(self.burst, self.tokens + max(0.0, now - self.updated) * self.rate)
        self.updated = now

    def missing_s(self, cost: float) -> float:
        """Return the seconds until the bucket holds this many tokens; 0.0 if it does now."""
        return max(0.0, cost - self.tokens) / self.rate


class RateLimit:
    """Token bucket per source, with a second one that all sources share if ``in_total`` is given.

    ``per_source``, ``in_total``: tokens per second. ``burst``, ``total_burst``: sizes of the buckets.
    ``max_sources``: buckets in memory; the source that was silent for longest is forgotten first.
    """

    def __init__(
        self,
        per_source: float,
        burst: float,
        *,
        in_total: float | None = None,
        total_burst: float = 0.0,
        max_sources: int = 100_000,
    ) -> None:
        self._per_source, self._burst = per_source, burst
        self._in_total, self._total_burst = in_total, total_burst
        self._max_sources = max_sources
        self._total: _Bucket | None = None
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()

    def take(self, source: Hashable | None, now: float, cost: float = 1.0) -> float:
        """Take tokens and return 0.0, or take none and return the seconds to wait.

        Without a source, only the bucket of all sources counts.
        """
        buckets = [] if source is None else [self._bucket_of(source, now)]
        if self._in_total is not None:
            self._total = self._total or _Bucket(self._in_total, self._total_burst, now)
            buckets.append(self._total)
        for each in buckets:
            each.refill(now)
        wait_s = max((each.missing_s(cost) for each in buckets), default=0.0)
        if wait_s == 0.0:
            for each in buckets:
                each.tokens -= cost
        return wait_s

    def _bucket_of(self, source: Hashable, now: float) -> _Bucket:
        bucket = self._buckets.pop(source, None) or _Bucket(self._per_source, self._burst, now)
        self._buckets[source] = bucket
        if len(self._buckets) > self._max_sources:
            self._buckets.popitem(last=False)
        return bucket

    def allows(self, source: Hashable | None, now: float, cost: float = 1.0) -> bool:
        """Take tokens and return True, or take none and return False."""
        return self.take(source, now, cost) == 0.0
