"""All-reduce over two groups: one of any backend inside each machine, and one of a leader of each machine.

It calls public functions of torch, one after another on each rank. So operations of each group keep one
order with backends of any kind. Decision 96 says why groups of ours do not do this by themselves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from barnraise.core.errors import CollectiveError, UnsupportedOperation

_OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def all_reduce_by_leaders(
    tensor: torch.Tensor,
    inside: dist.ProcessGroup,
    across: dist.ProcessGroup | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce a tensor in place over the ranks of several machines. Each of these ranks calls it.

    ``inside``: the ranks of this machine, with any backend. ``across``: on rank 0 of ``inside`` the group of
    these ranks of all machines, which only they use. Raise the error of a group if one fails, or
    CollectiveError on a rank whose leader got one.
    """
    if not any(op == getattr(dist.ReduceOp, name) for name in _OPERATIONS):
        raise UnsupportedOperation(
            f"{op} in two stages", hint=f"Use one of {', '.join(_OPERATIONS)}, and divide afterwards."
        )
    is_leader = dist.get_rank(inside) == 0
    if is_leader and not isinstance(across, dist.ProcessGroup):
        raise UnsupportedOperation(
            "a leader without the group of leaders", hint="Pass it as `across` on rank 0 of each machine."
        )
    _reduce_inside(tensor, inside, across, op)
    failure = _reduce_across(tensor, across, op) if is_leader else None
    # The others would otherwise wait for a broadcast that never comes.
    state = torch.tensor([0 if failure is not None else 1], device=tensor.device)
    dist.broadcast(state, group_src=0, group=inside)
    if failure is not None:
        raise failure
    if not int(state):
        raise CollectiveError(
            "the leader of this machine could not reduce with the leaders of the others",
            hint="The error of that rank names the reason.",
        )
    dist.broadcast(tensor, group_src=0, group=inside)


def _reduce_inside(
    tensor: torch.Tensor, inside: dist.ProcessGroup, across: object, op: dist.ReduceOp.RedOpType
) -> None:
    try:
        dist.reduce(tensor, group_dst=0, op=op, group=inside)
    except RuntimeError:
        # The leaders of other machines would wait for this one.
        if dist.get_rank(inside) == 0 and isinstance(across, dist.ProcessGroup):
            across.abort()
        raise


def _reduce_across(
    tensor: torch.Tensor, across: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType
) -> RuntimeError | None:
    try:
        dist.all_reduce(tensor, op=op, group=across)
    except RuntimeError as error:
        return error
    return None
