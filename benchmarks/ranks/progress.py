"""Progress of a rank in a file that outlives it, and the sequence of operations that all ranks agree on.

The driver reads from the page whether a victim had sent part of the operation in which it died. Imports
nothing but the standard library: the driver uses it too.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import NamedTuple

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LAYOUT = struct.Struct("<6q")
PAGE = 4096


class Progress(NamedTuple):
    """One rank's place in its sequence of operations."""

    operation: int
    running: int
    started_ns: int
    sent_before: int
    sent_now: int
    written_ns: int

    @classmethod
    def read(cls, path: Path) -> Progress:
        return cls(*LAYOUT.unpack(path.read_bytes()[: LAYOUT.size]))

    @staticmethod
    def prepare(path: Path) -> None:
        path.write_bytes(LAYOUT.pack(-1, 0, 0, 0, 0, 0).ljust(PAGE, b"\0"))


def plan(seed: int, index: int, smallest: int, largest: int) -> tuple[str, int]:
    """Return kind and bytes of operation ``index``: the same on every rank and in the driver."""
    source = random.Random(seed * 1_000_003 + index)
    exponent = source.uniform(0.0, 1.0)
    return source.choice(KINDS), int(smallest * (largest / smallest) ** exponent)
