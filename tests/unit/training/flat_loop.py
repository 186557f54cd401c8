"""One loop over all micro-batches, for tests that look at each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def microbatches(batches: Any) -> Iterator[Any]:
    """Yield the micro-batches of all batches."""
    for batch in batches:
        yield from batch
