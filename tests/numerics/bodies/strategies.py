"""Any other body under a given strategy and segment size, whatever ``auto`` would have taken."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tests.numerics.harness.worker import Context


@contextmanager
def _forced(ctx: Context, strategy: str, segment_bytes: int) -> Iterator[None]:
    """A group keeps the settings it was made with; here they change beneath it, on all ranks alike."""
    issuer = ctx.group._issuer
    before = issuer._settings
    issuer._settings = msgspec.structs.replace(
        before, strategy=strategy, segment_bytes=segment_bytes, arity=3
    )
    try:
        yield
    finally:
        issuer._settings = before


def under(ctx: Context, strategy: str, segment_bytes: int, inner: str, arguments: dict[str, Any]) -> Any:
    module, _, name = inner.partition(":")
    run = getattr(importlib.import_module(f"tests.numerics.bodies.{module}"), name)
    with _forced(ctx, strategy, segment_bytes):
        return run(ctx, **arguments)
