"""Any other body under a given strategy and segment size, whatever ``auto`` would have taken."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from backyard.collectives.client import current_mover
from tests.numerics.harness.worker import Context


@contextmanager
def _forced(strategy: str, segment_bytes: int) -> Iterator[None]:
    mover = current_mover()
    before = mover.settings
    collectives = msgspec.structs.replace(
        before.collectives, strategy=strategy, segment_bytes=segment_bytes, arity=3
    )
    mover.settings = msgspec.structs.replace(before, collectives=collectives)
    try:
        yield
    finally:
        mover.settings = before


def under(ctx: Context, strategy: str, segment_bytes: int, inner: str, arguments: dict[str, Any]) -> Any:
    module, _, name = inner.partition(":")
    run = getattr(importlib.import_module(f"tests.numerics.bodies.{module}"), name)
    with _forced(strategy, segment_bytes):
        return run(ctx, **arguments)
