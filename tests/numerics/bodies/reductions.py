"""Reducing collectives against the oracle: all_reduce, reduce, reduce_scatter in all its forms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.numerics.harness import values
from tests.numerics.harness.expectations import RAISES, RIGHT, WRONG, reduction
from tests.numerics.harness.worker import Context

SIZES = (0, 1, 7, 31, 1009)
ROOTED_SIZES = (0, 1, 7, 131)
Digests = dict[str, str]


def operation_of(name: str) -> dist.ReduceOp:
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(values.PREMULTIPLIER)
    return getattr(dist.ReduceOp, name)


def _each_operation(ctx: Context, dtype: str, check_operation: Callable[[str], None], label: str) -> None:
    """Run ``check_operation`` per operation; an operation that must be rejected leaves the backend usable."""
    for operation in values.OPERATIONS:
        expected = reduction(ctx.backend, dtype, operation)
        if expected == RIGHT:
            check_operation(operation)
        elif expected != WRONG:
            try:
                check_operation(operation)
            except Exception as error:
                text = str(error)
                ctx.check(
                    len(text) > 10, f"{label} {dtype} {operation}: the error has no explanation: {text!r}"
                )
            else:
                ctx.check(expected != RAISES, f"{label} {dtype} {operation}: did not raise")


def _compare(
    ctx: Context, label: str, got: torch.Tensor, dtype: str, operation: str, parts: list[torch.Tensor]
) -> None:
    wanted = values.reduced(dtype, operation, parts).reshape(got.shape)
    exact = operation != "AVG" or len(parts) in (1, 2, 4) or dtype in values.INTEGERS
    if exact and (values.same_bits(got, wanted) or (got.is_complex() and torch.equal(got, wanted))):
        return  # complex products may differ in the sign of a zero
    if not exact:
        wide = torch.complex128 if got.is_complex() else torch.float64
        allowed = values.rounding(dtype, parts).reshape(got.shape) / len(parts)
        if bool(((got.to(wide) - wanted.to(wide)).abs() <= allowed).all()):
            return
    flat, right = got.reshape(-1), wanted.reshape(-1)
    where = next((i for i in range(len(flat)) if not values.same_bits(flat[i], right[i])), -1)
    ctx.failures.append(
        f"{label} {dtype} {operation} n={got.numel()}: at {where} {flat[where]} is not {right[where]}"
    )


def all_reduce(ctx: Context, dtype: str, sizes: list[int] | None = None) -> Digests:
    digests: Digests = {}

    def check(operation: str) -> None:
        for call, size in enumerate(sizes or SIZES):
            parts = [values.inputs(dtype, operation, size, rank, call) for rank in range(ctx.world)]
            tensor = parts[ctx.rank].clone()
            dist.all_reduce(tensor, op=operation_of(operation), group=ctx.group)
            _compare(ctx, "all_reduce", tensor, dtype, operation, parts)
            digests[f"{operation}-{size}"] = values.digest(tensor)

    _each_operation(ctx, dtype, check, "all_reduce")
    return digests


def all_reduce_rough(ctx: Context, dtype: str, sizes: list[int]) -> Digests:
    """Numbers whose sums round: within rounding of the exact sum, and the same bits on every rank."""
    digests: Digests = {}
    for call, size in enumerate(sizes):
        parts = [values.rough_inputs(dtype, size, rank, call) for rank in range(ctx.world)]
        for operation in ("SUM", "AVG"):
            tensor = parts[ctx.rank].clone()
            dist.all_reduce(tensor, op=operation_of(operation), group=ctx.group)
            wide = torch.stack([part.double() for part in parts]).sum(0)
            allowed = values.rounding(dtype, parts)
            if operation == "AVG":
                wide, allowed = wide / ctx.world, allowed / ctx.world
            good = ((tensor.double() - wide).abs() <= allowed).all()
            ctx.check(bool(good), f"all_reduce {dtype} {operation} n={size}: beyond rounding")
            digests[f"{operation}-{size}"] = values.digest(tensor)
    return digests


def all_reduce_repeated(ctx: Context, size: int, calls: int) -> Digests:
    """Many calls in flight, each with its own numbers: a chunk of another call must not pass."""
    parts = [
        [values.inputs("float32", "SUM", size, rank, call) for rank in range(ctx.world)]
        for call in range(calls)
    ]
    tensors = [parts[call][ctx.rank].clone() for call in range(calls)]
    works = [dist.all_reduce(tensor, group=ctx.group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    for call, tensor in enumerate(tensors):
        _compare(ctx, f"all_reduce call {call}", tensor, "float32", "SUM", parts[call])
    return {str(call): values.digest(tensor) for call, tensor in enumerate(tensors)}


def reduce(ctx: Context, dtype: str) -> None:
    def check(operation: str) -> None:
        for root in range(ctx.world):
            for call, size in enumerate(ROOTED_SIZES):
                parts = [
                    values.inputs(dtype, operation, size, rank, call + 10 * root) for rank in range(ctx.world)
                ]
                tensor = parts[ctx.rank].clone()
                dist.reduce(tensor, group_dst=root, op=operation_of(operation), group=ctx.group)
                if ctx.rank == root:
                    _compare(ctx, f"reduce to {root}", tensor, dtype, operation, parts)

    _each_operation(ctx, dtype, check, "reduce")


def reduce_scatter_tensor(ctx: Context, dtype: str) -> None:
    def check(operation: str) -> None:
        for call, size in enumerate(SIZES):
            whole = [
                values.inputs(dtype, operation, size * ctx.world, rank, call) for rank in range(ctx.world)
            ]
            output = torch.empty(size, dtype=values.DTYPES[dtype])
            dist.reduce_scatter_single(
                output, whole[ctx.rank].clone(), op=operation_of(operation), group=ctx.group
            )
            own_parts = [tensor[ctx.rank * size : (ctx.rank + 1) * size] for tensor in whole]
            _compare(ctx, "reduce_scatter_tensor", output, dtype, operation, own_parts)

    _each_operation(ctx, dtype, check, "reduce_scatter_tensor")


def reduce_scatter_list(ctx: Context, dtype: str) -> None:
    """Uneven lists: rank r receives r + 3 elements more than rank 0 has."""

    def check(operation: str) -> None:
        for call, base in enumerate((0, 1, 29)):
            sizes = [base + 3 * rank for rank in range(ctx.world)]
            lists = [
                [
                    values.inputs(dtype, operation, size, rank, call + 10 * slot)
                    for slot, size in enumerate(sizes)
                ]
                for rank in range(ctx.world)
            ]
            output = torch.empty(sizes[ctx.rank], dtype=values.DTYPES[dtype])
            dist.reduce_scatter(
                output, [t.clone() for t in lists[ctx.rank]], op=operation_of(operation), group=ctx.group
            )
            own_parts = [lists[rank][ctx.rank] for rank in range(ctx.world)]
            _compare(ctx, "reduce_scatter list", output, dtype, operation, own_parts)

    _each_operation(ctx, dtype, check, "reduce_scatter list")


def average_of_large_halves(ctx: Context) -> None:
    """60000 averaged with 60000 in float16 is 60000, although their sum does not exist in float16."""
    tensor = torch.full((9,), 60000.0, dtype=torch.float16)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=ctx.group)
    ctx.check(bool((tensor == 60000).all()) or _near_60000(ctx, tensor), f"all_reduce AVG gave {tensor[0]}")
    tensor = torch.full((9,), 60000.0, dtype=torch.float16)
    dist.reduce(tensor, group_dst=0, op=dist.ReduceOp.AVG, group=ctx.group)
    if ctx.rank == 0:
        ctx.check(_near_60000(ctx, tensor), f"reduce AVG gave {tensor[0]}")
    output = torch.empty(4, dtype=torch.float16)
    whole = torch.full((4 * ctx.world,), 60000.0, dtype=torch.float16)
    dist.reduce_scatter_single(output, whole, op=dist.ReduceOp.AVG, group=ctx.group)
    ctx.check(_near_60000(ctx, output), f"reduce_scatter AVG gave {output[0]}")


def _near_60000(ctx: Context, tensor: torch.Tensor) -> bool:
    """Exact for worlds of a power of two; elsewhere dividing by the world may round (in steps of 32)."""
    slack = 0 if ctx.world in (1, 2, 4) else 64
    return bool(((tensor.double() - 60000).abs() <= slack).all())


def not_numbers(ctx: Context) -> Digests:
    """Check that NaN of any rank reaches every rank, and that infinities add as in torch."""
    digests: Digests = {}
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        for operation in ("SUM", "MIN", "MAX", "AVG"):
            for culprit in range(ctx.world):
                parts = [values.inputs(dtype, operation, 23, rank, culprit) for rank in range(ctx.world)]
                parts[culprit][5] = float("nan")
                parts[culprit][7] = float("inf")
                parts[culprit][11] = float("-inf")
                tensor = parts[ctx.rank].clone()
                dist.all_reduce(tensor, op=operation_of(operation), group=ctx.group)
                wide = values.reduced(dtype, operation, parts)
                label = f"{dtype} {operation} from rank {culprit}"
                ctx.check(bool(tensor[5].isnan()), f"{label}: NaN became {tensor[5]}")
                for place in (7, 11):
                    ctx.check(
                        bool(tensor[place] == wide[place]), f"{label}: {tensor[place]} not {wide[place]}"
                    )
                digests[label] = values.digest(tensor)
    return digests


def premultiplied_by(ctx: Context, factor: float, tensor_factor: bool) -> None:
    """PREMUL_SUM with a number, and with a tensor of one element, as NCCL accepts both."""
    parts = [values.inputs("float32", "SUM", 37, rank, 3) for rank in range(ctx.world)]
    operation = dist._make_nccl_premul_sum(torch.tensor([factor]) if tensor_factor else factor)
    tensor = parts[ctx.rank].clone()
    dist.all_reduce(tensor, op=operation, group=ctx.group)
    wanted = (torch.stack([part.double() for part in parts]) * factor).sum(0)
    allowed = values.rounding("float32", parts) * max(1.0, abs(factor))
    ctx.check(bool(((tensor.double() - wanted).abs() <= allowed).all()), f"PREMUL_SUM by {factor} is wrong")
