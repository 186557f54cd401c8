"""Runs any other body with a forced algorithm and segment size, in place of ``auto``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from barnraise.collectives import call_options
from barnraise.core import metrics
from barnraise.core.errors import UnsupportedOperation
from barnraise.planning import Levels, read_levels
from tests.numerics.harness.worker import Context


@contextmanager
def _forced(ctx: Context, algorithm: str, segment_bytes: int) -> Iterator[None]:
    """A group keeps the settings it was made with; here they change beneath it, on all ranks alike."""
    submitter = ctx.group.submitter
    before = submitter._settings
    submitter._settings = msgspec.structs.replace(
        before, strategy=algorithm, segment_bytes=segment_bytes, arity=3
    )
    try:
        yield
    finally:
        submitter._settings = before


def under(ctx: Context, algorithm: str, segment_bytes: int, inner: str, arguments: dict[str, Any]) -> Any:
    with _forced(ctx, algorithm, segment_bytes):
        return _run(ctx, inner, arguments)


def by_level(
    ctx: Context,
    sites: list[list[int]],
    levels: dict[str, dict[str, str]],
    inner: str,
    arguments: dict[str, Any],
) -> Any:
    """Through sites, as a person has fixed it; and which strategies it took."""
    before = _counted()
    ctx.group.set_sites(sites)
    ctx.group.set_levels(read_levels(levels, ()))
    try:
        with _forced(ctx, "auto", 4096):
            result = _run(ctx, inner, arguments)
    finally:
        ctx.group.set_sites(())
        ctx.group.set_levels(Levels())
    return result, sorted(name for name, count in _counted().items() if count > before.get(name, 0.0))


def through_sites(ctx: Context, sites: list[list[int]], inner: str, arguments: dict[str, Any]) -> Any:
    """Run a body with the hierarchical algorithm of each operation that has one."""
    ctx.group.set_sites(sites)
    try:
        with _forced(ctx, "sites", 1024):
            return _run(ctx, inner, arguments)
    finally:
        ctx.group.set_sites(())


def in_block(ctx: Context, options: dict[str, Any], inner: str, arguments: dict[str, Any]) -> Any:
    """Run a body in a block that names the algorithm. Return its result and the algorithms of its sums."""
    before = _counted()
    with call_options(**options):
        result = _run(ctx, inner, arguments)
        refusal = ""
        try:
            dist.all_to_all_single(torch.zeros(ctx.world), torch.zeros(ctx.world), group=ctx.group)
        except UnsupportedOperation as error:
            refusal = str(error)
        ctx.check("all_to_all has no algorithm" in refusal, f"an all-to-all in the block: {refusal!r}")
    dist.barrier(group=ctx.group)
    return result, sorted(name for name, count in _counted().items() if count > before.get(name, 0.0))


def _run(ctx: Context, inner: str, arguments: dict[str, Any]) -> Any:
    module, _, name = inner.partition(":")
    return getattr(importlib.import_module(f"tests.numerics.bodies.{module}"), name)(ctx, **arguments)


def _counted() -> dict[str, float]:
    """Return the number of all-reduces by algorithm."""
    return {
        sample.labels[1]: sample.value
        for sample in metrics.registry.samples()
        if sample.name == "barnraise_collective_duration_seconds_count" and sample.labels[0] == "all_reduce"
    }
