"""The entries of torch's flight recorder about operations of a group."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from tests.numerics.harness.worker import Context


def operations_are_recorded(ctx: Context) -> None:
    """Run two operations, and look for them among the recorder's entries."""
    dist.all_reduce(torch.ones(7), group=ctx.group)
    work = dist.broadcast(torch.ones(5), group_src=0, group=ctx.group, async_op=True)
    assert work is not None
    work.wait()
    ctx.check(work.is_completed(), "is_completed() after wait()")
    trace = json.loads(_distributed_c10d._dump_fr_trace_json(includeCollectives=True, backend="barnraise"))
    names = " ".join(str(entry.get("profiling_name")) for entry in trace.get("entries", ()))
    for wanted in ("all_reduce", "broadcast"):
        ctx.check(f"barnraise:{wanted}" in names, f"no {wanted} in {names[-500:]!r}")
