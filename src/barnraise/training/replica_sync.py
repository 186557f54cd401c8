"""Equal replicas for plain DDP between machines whose torch builds compute differently.

All-reduced gradients have the same bits everywhere. The optimizer's step may not: builds of torch for Linux,
Windows and arm64 round some operations differently. So replicas drift apart, and nothing reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.optim import Optimizer

from barnraise.core.errors import RunError

_BUFFER_BYTES = 16 << 20


def sync_replicas(
    model: torch.nn.Module,
    *optimizers: Optimizer,
    every: int = 32,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Copy the first rank's parameters, buffers and optimizer state to all ranks every ``every`` steps.

    Call it once on all ranks, after the optimizers are made. Each of them must step equally often on all
    ranks. With one rank it does nothing.
    """
    if not optimizers:
        raise RunError("sync_replicas needs an optimizer", hint="Call it as sync_replicas(model, optimizer).")
    if every < 1:
        raise RunError(f"sync_replicas cannot copy every {every} steps", hint="Use a number of at least 1.")
    if dist.get_world_size(group) == 1:
        return
    steps = 0

    def after_step(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal steps
        steps += 1
        if steps % every == 0:
            _copy(model, optimizers, group)

    optimizers[-1].register_step_post_hook(after_step)


@torch.no_grad()
def _copy(model: torch.nn.Module, optimizers: tuple[Optimizer, ...], group: dist.ProcessGroup | None) -> None:
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    tensors += _state_tensors(optimizers)
    chosen = group if group is not None else dist.distributed_c10d._get_default_group()
    # One call for each kind: coalesced tensors share a buffer.
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same_kind in kinds.values():
        _broadcast_coalesced(chosen, same_kind, _BUFFER_BYTES, 0)


def _state_tensors(optimizers: tuple[Optimizer, ...]) -> Iterator[torch.Tensor]:
    """Yield the tensors of the optimizers' state, in the order of their parameters."""
    for optimizer in optimizers:
        for parameter in (parameter for part in optimizer.param_groups for parameter in part["params"]):
            for _, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    yield value
