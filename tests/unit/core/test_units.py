from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ConfigError
from barnraise.core.units import (
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("5 s", 5.0),
        ("0.1ms", 1e-4),
        ("250us", 2.5e-4),
        ("2min", 120.0),
        ("1h", 3600.0),
        ("0", 0.0),
    ],
)
def test_parse_duration_returns_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"),
    [("256kb", 256_000), ("256KiB", 262_144), ("1 MiB", 1_048_576), ("4096", 4096), ("1.5GB", 1_500_000_000)],
)
def test_parse_size_returns_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1gbit", 10**9),
        ("20 Mbit/s", 2 * 10**7),
        ("100mbps", 10**8),
        ("100MB/s", 8 * 10**8),
        ("5Mbit", 5 * 10**6),
    ],
)
def test_parse_rate_returns_bits_per_second(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "fast", "-1ms", "1 2ms", "1e3ms", "5", "5 parsecs", "٣ms", "nan", "1ms\n2"]
)
def test_parse_duration_of_other_text_raises_with_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration(text)
    assert caught.value.hint.endswith(".")


@given(st.text(max_size=30))
def test_parsers_of_any_text_raise_config_error_only(text: str) -> None:
    for parse in (parse_duration, parse_size, parse_rate):
        try:
            assert parse(text) >= 0
        except ConfigError:
            pass


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_size(0), "0 B"),
        (format_size(1023), "1023 B"),
        (format_size(33_554_432), "32 MiB"),
        (format_size(1536), "1.5 KiB"),
        (format_size(5 * 2**40), "5 TiB"),
        (format_rate(1e9), "1 Gbit/s"),
        (format_rate(5_250_000), "5.25 Mbit/s"),
        (format_duration(0.02), "20 ms"),
        (format_duration(0), "0 s"),
        (format_duration(2.7e-5), "27 µs"),
        (format_duration(390), "6.5 min"),
        (format_duration(10.6), "10.6 s"),
    ],
)
def test_format_functions_return_short_text(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.integers(min_value=0, max_value=2**50))
def test_formatted_size_parses_back_within_one_percent(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.01)
