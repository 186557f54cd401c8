"""The bodies of these tests on ranks that are threads: a pool without processes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from barnraise.testing import spawn
from tests.numerics.harness.pool import WORLD, Answer, raise_failures
from tests.numerics.harness.worker import OPERATION_SECONDS, Context


def run_simulated(body: str, scratch: Path, world: int = WORLD, **arguments: Any) -> list[Any]:
    """Run ``module:function`` on simulated ranks; its return values in rank order, or PoolError."""
    module, _, name = body.partition(":")
    function = getattr(importlib.import_module(f"tests.numerics.bodies.{module}"), name)

    def on_rank(rank: int) -> Answer:
        group = dist.group.WORLD
        assert group is not None
        context = Context("barnraise", rank, world, group, scratch)
        value = function(context, **arguments)
        return Answer(True, value, context.failures)

    answers = list(spawn(on_rank, world=world, timeout_s=OPERATION_SECONDS).values())
    raise_failures(answers, body, world, arguments)
    return [answer.value for answer in answers]
