"""Bodies that misbehave, to test the harness."""

from __future__ import annotations

import os
import time

from tests.numerics.harness.worker import Context


def ranks(ctx: Context) -> int:
    return ctx.rank


def raise_on(ctx: Context, rank: int) -> None:
    if ctx.rank == rank:
        raise RuntimeError("on purpose")


def note_on(ctx: Context, rank: int) -> None:
    ctx.check(ctx.rank != rank, "noted on purpose")


def sleep_on(ctx: Context, rank: int) -> None:
    if ctx.rank == rank:
        time.sleep(3600)


def exit_on(ctx: Context, rank: int) -> None:
    if ctx.rank == rank:
        os._exit(9)
