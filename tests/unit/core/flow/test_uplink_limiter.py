"""Rate limit of sent bytes: never faster than its rate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.flow.uplink_limiter import UplinkLimiter


@given(st.floats(1e3, 1e9), st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50))
def test_uplink_mean_rate_stays_below_cap(rate: float, sizes: list[int]) -> None:
    pace, now, sent = UplinkLimiter(rate), 100.0, 0
    for size in sizes:
        now += pace.delay(size, now)
        assert sent <= rate * (now - 100.0) * (1 + 1e-9) + 1e-3
        sent += size


def test_uplink_without_cap_does_not_delay() -> None:
    pace = UplinkLimiter(0.0)
    assert pace.delay(1 << 30, 1.0) == 0.0
    assert UplinkLimiter(125_000).burst_bytes == 31_250


def test_uplink_is_free_again_when_the_sent_bytes_fit() -> None:
    pace = UplinkLimiter(1000.0)
    assert pace.free_in(5.0) == 0.0
    pace.delay(500, 5.0)
    assert pace.free_in(5.0) == 0.5
    assert pace.free_in(5.4) > 0.0
    assert pace.free_in(5.5) == 0.0
    assert UplinkLimiter(0.0).free_in(5.0) == 0.0
