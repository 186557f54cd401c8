"""Parsing and formatting of rates, times and sizes: ``1gbit``, ``20ms``, ``256kb``, ``1.5 GiB``.

Prefixes without ``i`` are decimal (``kb`` is 1,000 bytes), with ``i`` binary (``KiB`` is 1,024). Rates count
bits per second, unless the unit says bytes (``MB/s``). Letters may be of either case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from barnraise.core.errors import ConfigError

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zµ/]*)\s*", re.IGNORECASE | re.ASCII)

_DURATIONS: Mapping[str, float] = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_PREFIXES: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_PREFIXES: Mapping[str, int] = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_SIZES: Mapping[str, int] = {
    "": 1,
    **{f"{prefix}b": factor for prefix, factor in {**_PREFIXES, **_BINARY_PREFIXES}.items()},
}
_RATES: Mapping[str, int] = {
    **{f"{prefix}bit": factor for prefix, factor in _PREFIXES.items()},
    **{f"{prefix}bit/s": factor for prefix, factor in _PREFIXES.items()},
    **{f"{prefix}bps": factor for prefix, factor in _PREFIXES.items()},
    **{f"{unit}/s": 8 * factor for unit, factor in _SIZES.items() if unit},
}


def parse_duration(text: str) -> float:
    """Parse ``20ms``, ``5 s`` or ``2min`` into seconds. A bare ``0`` needs no unit."""
    return _parse(text, _DURATIONS, what="time", example="20ms")


def parse_size(text: str) -> int:
    """Parse ``256kb``, ``1 MiB`` or ``4096`` into bytes."""
    return round(_parse(text, _SIZES, what="size", example="256kb"))


def parse_rate(text: str) -> int:
    """Parse ``1gbit``, ``20 Mbit/s`` or ``100MB/s`` into bits per second."""
    return round(_parse(text, _RATES, what="rate", example="1gbit"))


def _parse(text: str, units: Mapping[str, float], *, what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a {what}", hint=f"Write a number and a unit, such as {example}.")
    number, unit = float(match[1]), match[2].lower()
    if unit not in units:
        if number == 0 and not unit:
            return 0.0
        known = ", ".join(name for name in units if name)
        raise ConfigError(
            f"{text!r} is not a {what}: it has {f'the unknown unit {match[2]!r}' if unit else 'no unit'}",
            hint=f"Write a number and one of these units: {known}.",
        )
    return number * units[unit]


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 file`` or ``2 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_size(count: float) -> str:
    """Format a number of bytes: ``format_size(33_554_432) == "32 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{_short(count)} {unit}"
        count /= 1024
    return f"{_short(count)} TiB"


def format_rate(bits_per_second: float) -> str:
    """Format a number of bits per second: ``format_rate(1e9) == "1 Gbit/s"``."""
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if abs(bits_per_second) < 1000:
            return f"{_short(bits_per_second)} {unit}"
        bits_per_second /= 1000
    return f"{_short(bits_per_second)} Gbit/s"


def format_duration(seconds: float) -> str:
    """Format a number of seconds: ``format_duration(0.02) == "20 ms"``."""
    if seconds == 0:
        return "0 s"
    magnitude = abs(seconds)
    for unit, factor in (("ns", 1e9), ("µs", 1e6), ("ms", 1e3)):
        if magnitude * factor < 999.5:
            return f"{_short(seconds * factor)} {unit}"
    if magnitude < 120:
        return f"{_short(seconds)} s"
    if magnitude < 7200:
        return f"{_short(seconds / 60)} min"
    return f"{_short(seconds / 3600)} h"


def _short(value: float) -> str:
    """Format a number with at most three digits, without trailing zeros or an exponent."""
    magnitude = abs(value)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
