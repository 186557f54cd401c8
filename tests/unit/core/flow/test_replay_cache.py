"""Replay cache: replays are found, memory stays bounded, and a full cache keeps to its policy."""

from __future__ import annotations

from barnraise.core.flow.replay_cache import KeyCheck, ReplayCache


def test_evicting_cache_finds_replays_of_newest_keys() -> None:
    cache = ReplayCache[int](4, evict_when_full=True)
    assert [cache.add(key) for key in range(10)] == [KeyCheck.NEW] * 10
    assert len(cache) == 4
    assert [cache.add(key) for key in range(6, 10)] == [KeyCheck.REPLAY] * 4
    assert cache.add(0) is KeyCheck.NEW, "the oldest keys were evicted"


def test_rejecting_cache_forgets_no_key_before_its_time() -> None:
    cache = ReplayCache[str](2, ttl_s=10.0, evict_when_full=False)
    assert cache.add("a", 0.0) is KeyCheck.NEW
    assert cache.add("b", 5.0) is KeyCheck.NEW
    assert cache.add("c", 6.0) is KeyCheck.FULL
    assert cache.add("a", 10.0) is KeyCheck.REPLAY
    assert cache.add("c", 10.1) is KeyCheck.NEW, "the first key has expired"
    assert cache.add("b", 15.0) is KeyCheck.REPLAY
    assert cache.add("a", 15.1) is KeyCheck.NEW
    assert len(cache) == 2


def test_count_of_sender_follows_what_is_remembered() -> None:
    cache = ReplayCache[int](3, ttl_s=10.0, evict_when_full=True)
    for key, sender in enumerate("aabb"):
        cache.add(key, float(key), sender)
    assert (cache.count_of("a", 3.0), cache.count_of("b", 3.0)) == (1, 2), "the oldest was evicted"
    assert cache.add(3, 4.0, "a") is KeyCheck.REPLAY
    assert (cache.count_of("a", 12.5), cache.count_of("b", 12.5)) == (0, 1), "two have expired"
