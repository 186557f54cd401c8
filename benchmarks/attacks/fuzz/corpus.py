"""The corpus: valid messages and inputs that once broke a parser, one file of hex lines for each parser.

``python -m benchmarks.attacks.fuzz --record`` adds what is missing: messages made from types, the golden
vectors, and real messages. Lines that are there stay, so an input that broke a parser is always tried again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "tests" / "corpus"
_VECTORS = Path(__file__).parents[3] / "tests" / "vectors"
LONGEST = 4096  # longer seeds make slow cases


def seeds_of(name: str) -> list[bytes]:
    """Return the corpus of one parser; empty without a file."""
    path = FOLDER / f"{name}.txt"
    if not path.exists():
        return []
    return [bytes.fromhex(line) for line in path.read_text("ascii").splitlines()]


def add(name: str, inputs: Sequence[bytes]) -> int:
    """Add inputs to the corpus of a parser, and return how many are new."""
    known = seeds_of(name)
    new = [data for data in dict.fromkeys(inputs) if data not in known and len(data) <= LONGEST]
    if new or not known:
        FOLDER.mkdir(exist_ok=True)
        lines = "".join(f"{data.hex()}\n" for data in [*known, *new])
        (FOLDER / f"{name}.txt").write_text(lines, encoding="ascii")
    return len(new)


def vectors(name: str) -> list[bytes]:
    """Return every text of hex digits in a file of golden vectors."""
    return list(_hex(json.loads((_VECTORS / f"{name}.json").read_text("utf-8"))))


def _hex(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _hex(item)
    elif isinstance(value, list):
        for item in value:
            yield from _hex(item)
    elif isinstance(value, str) and len(value) > 8:
        try:
            yield bytes.fromhex(value)
        except ValueError:
            return
