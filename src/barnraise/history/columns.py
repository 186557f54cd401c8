"""Columns of logged values: float32 in little-endian bytes. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

_LARGEST = 3.4028234663852886e38
_WIDTH = 4


def pack_column(values: Sequence[float]) -> bytes:
    """Return the values as float32; one that is too large becomes infinite."""
    return struct.pack(f"<{len(values)}f", *map(_narrow, values))


def unpack_column(column: bytes) -> tuple[float, ...]:
    """Return the values of a column; an incomplete last one is left out."""
    count = len(column) // _WIDTH
    return struct.unpack(f"<{count}f", column[: count * _WIDTH])


def _narrow(value: float) -> float:
    return value if not math.isfinite(value) or abs(value) <= _LARGEST else math.copysign(math.inf, value)
