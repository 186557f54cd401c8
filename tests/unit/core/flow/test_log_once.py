"""Messages that appear once."""

from __future__ import annotations

from barnraise.core.flow.log_once import first_time


def test_first_time_returns_true_once_per_key() -> None:
    key = object()
    assert first_time(key)
    assert not first_time(key)
    assert first_time((key, 2))
