"""Times at which discovery asks again for each thing it searches. Pure: the time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

from barnraise.core.flow.backoff import Backoff

_MIN_INTERVAL_S = 1.0


@dataclass
class _Search:
    next_at: float
    attempt: int = 0
    asked_at: float = float("-inf")
    seen_until: float = float("-inf")


class SearchSchedule:
    """Time of the next query for each key that is searched.

    The first query is due ``patience_s`` after the search started, the next ones with backoff. After a
    sighting there is no query until ``forget_s`` have passed without another one.
    """

    def __init__(self, backoff: Backoff, *, patience_s: float = 0.0, forget_s: float | None = None) -> None:
        self._backoff = backoff
        self._patience_s = patience_s
        self._forget_s = forget_s
        self._searches: dict[str, _Search] = {}

    def want(self, keys: frozenset[str], now: float) -> None:
        """Search exactly these keys; a search that continues keeps its backoff."""
        for removed in self._searches.keys() - keys:
            del self._searches[removed]
        for key in keys - self._searches.keys():
            self._searches[key] = _Search(now + self._patience_s)

    def restart(self, now: float) -> None:
        """Make every key that is not seen due now, at most once a second, and reset its backoff."""
        for search in self._searches.values():
            if search.seen_until <= now:
                search.attempt, search.next_at = 0, max(now, search.asked_at + _MIN_INTERVAL_S)

    def seen(self, key: str, now: float) -> None:
        """Record a sighting of the key, which pauses its queries."""
        search = self._searches.get(key)
        if search is not None and self._forget_s is not None:
            search.attempt, search.next_at = 0, now + self._forget_s
            search.seen_until = search.next_at

    def due(self, now: float) -> list[str]:
        """Return the keys to query now, and count each as queried."""
        keys = sorted(key for key, search in self._searches.items() if search.next_at <= now)
        for key in keys:
            search = self._searches[key]
            search.next_at = now + self._backoff.wait(search.attempt)
            search.attempt += 1
            search.asked_at = now
        return keys

    def next_at(self) -> float | None:
        """Return the time of the next query, or None if nothing is searched."""
        return min((search.next_at for search in self._searches.values()), default=None)
