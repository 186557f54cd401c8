"""Times of queries for searched keys."""

from __future__ import annotations

from barnraise.core.flow.backoff import Backoff
from barnraise.discovery.search_schedule import SearchSchedule


def test_search_waits_then_queries_with_backoff_and_pauses_when_seen() -> None:
    searches = SearchSchedule(Backoff(5.0, 60.0), patience_s=5.0, forget_s=90.0)
    searches.want(frozenset({"x"}), 0.0)
    query_times = [now for now in range(200) if searches.due(float(now))]
    assert query_times == [5, 10, 20, 40, 80, 140]
    searches.seen("x", 200.0)
    searches.restart(201.0)
    assert searches.due(289.0) == []
    assert searches.due(290.0) == ["x"]
    searches.want(frozenset({"y"}), 300.0)
    assert searches.next_at() == 305.0
    searches.want(frozenset(), 300.0)
    assert searches.next_at() is None


def test_search_restart_queries_at_once_but_not_twice_in_a_second() -> None:
    searches = SearchSchedule(Backoff(5.0, 60.0))
    searches.want(frozenset({"x"}), 0.0)
    assert searches.due(0.0) == ["x"]
    searches.restart(0.1)
    searches.restart(0.2)
    assert searches.due(0.9) == []
    assert searches.due(1.0) == ["x"]
