"""One worker of a pool: joins the group, then runs bodies named on its standard input until told to exit."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

OPERATION_SECONDS = 60


@dataclass
class Context:
    """Context of a body: its rank, its group, and a list of failed checks."""

    backend: str
    rank: int
    world: int
    group: dist.ProcessGroup
    scratch: Path
    failures: list[str] = field(default_factory=list)

    def check(self, truth: bool, message: str) -> None:
        """Note a failure and go on: a rank that stopped here would leave the others waiting."""
        if not truth:
            self.failures.append(message)


def main() -> None:
    options = _options()
    answers = _take_stdout()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    try:
        groups = _join(options)
    except BaseException:
        _answer(answers, ok=False, error=traceback.format_exc())
        raise
    _answer(answers, ok=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["body"] == "exit":
            break
        context = Context(
            backend=options.backend,
            rank=options.rank,
            world=request["world"],
            group=groups[request["world"]],
            scratch=Path(options.scratch),
        )
        _answer(answers, **_run(request, context))
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--scratch", required=True)
    return parser.parse_args()


def _take_stdout() -> Any:
    """Reserve standard output for answers. All other output goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers


def _join(options: argparse.Namespace) -> dict[int, dist.ProcessGroup]:
    if options.backend == "barnraise":
        from barnraise.collectives.torch_patch.autoload import register

        register()
    store = dist.FileStore(options.store, options.world)
    dist.init_process_group(
        options.backend,
        store=store,
        rank=options.rank,
        world_size=options.world,
        timeout=timedelta(seconds=OPERATION_SECONDS),
    )
    return {size: dist.new_group(list(range(size))) for size in range(1, options.world + 1)}


def _run(request: dict[str, Any], context: Context) -> dict[str, Any]:
    module, _, name = request["body"].partition(":")
    try:
        body = getattr(importlib.import_module(f"tests.numerics.bodies.{module}"), name)
        value = body(context, **request["arguments"])
    except Exception:
        # A coalescing block left by an error makes torch swallow every later operation of that group.
        dist.distributed_c10d._world.pg_coalesce_state.clear()
        return {"ok": False, "error": traceback.format_exc(), "failures": context.failures}
    return {"ok": True, "value": value, "failures": context.failures}


def _answer(stream: Any, **answer: Any) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
