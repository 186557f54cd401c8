"""Rates, times and shares as people write them, into plain numbers. Pure."""

import re

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z%]*)\s*")
_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _split(text: str, units: list[str]) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not understood. Write a number and one of: {', '.join(units)}.")
    return float(match[1]), match[2].lower()


def bits_per_second(rate: str) -> int:
    """Parse a rate: `"1gbit"` is 1,000,000,000."""
    number, unit = _split(rate, list(_RATES))
    bits = round(number * _RATES[unit])
    if bits < 8000:
        raise ValueError(f"The rate {rate!r} is below 8 kbit/s. Ask for a higher one.")
    return bits


def seconds(duration: str) -> float:
    """Parse a duration: `"20ms"` is 0.02."""
    number, unit = _split(duration, list(_TIMES))
    return number * _TIMES[unit]


def share(loss: float | str) -> float:
    """Parse a share: `0.05` and `"5%"` are both one packet in twenty."""
    value = _split(loss, ["%"])[0] / 100 if isinstance(loss, str) else float(loss)
    if not 0 <= value <= 1:
        raise ValueError(f"The loss {loss!r} is not between 0 and 1. Write 0.05 or '5%' for one in twenty.")
    return value
