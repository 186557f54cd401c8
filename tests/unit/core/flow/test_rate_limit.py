"""Token buckets per source and in total, with bounded memory."""

from __future__ import annotations

import pytest

from barnraise.core.flow.rate_limit import RateLimit


def test_rate_limit_per_source_and_in_total() -> None:
    limit = RateLimit(1.0, 4.0, in_total=20.0, total_burst=16.0, max_sources=8)
    assert [limit.allows("a", 0.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert limit.allows("b", 0.0)
    assert not limit.allows("a", 0.9)
    assert limit.allows("a", 1.1)
    # A flood from ever new sources is held by the total, and leaves nothing behind.
    taken = sum(limit.allows(f"s{number}", 10.0 + number / 10_000) for number in range(10_000))
    assert taken <= 16 + 20
    assert len(limit._buckets) <= 8


def test_rate_limit_refills_and_returns_seconds_to_wait() -> None:
    limit = RateLimit(2.0, 3.0, max_sources=2)
    assert [limit.take("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert limit.take("a", 0.5) == 0.0
    assert limit.take("b", 0.5) == 0.0
    assert limit.take("c", 0.5) == 0.0
    assert len(limit._buckets) == 2
    assert limit.take("a", 0.5) == pytest.approx(0.0), "a forgotten source starts with a full bucket"


def test_rate_limit_when_total_is_spent_takes_no_token_of_source() -> None:
    limit = RateLimit(1.0, 1.0, in_total=0.5, total_burst=1.0)
    assert limit.take("a", 0.0) == 0.0
    assert limit.take("b", 0.0) == 2.0
    assert limit.take("b", 2.0) == 0.0


def test_rate_limit_with_clock_that_goes_back_loses_no_tokens() -> None:
    limit = RateLimit(1.0, 2.0)
    assert limit.take("a", 10.0) == 0.0
    assert limit.take("a", 5.0) == 0.0
