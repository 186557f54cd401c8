"""torch's reduce operations as ours: what scales, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from barnraise.collectives.ops.dtypes import by_name
from barnraise.collectives.ops.reduction import Reduction, reduction_of
from barnraise.core.errors import UnsupportedOperation


def _of(op: dist.ReduceOp.RedOpType, name: str, world: int = 4) -> Reduction:
    return reduction_of(dist.ReduceOp(op), by_name(name), world)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.PRODUCT, "product"),
        (dist.ReduceOp.MIN, "min"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.BAND, "band"),
        (dist.ReduceOp.BOR, "bor"),
        (dist.ReduceOp.BXOR, "bxor"),
    ],
)
def test_plain_reduce_ops_do_not_scale(op: dist.ReduceOp.RedOpType, name: str) -> None:
    assert _of(op, "int32") == Reduction(name)


@pytest.mark.parametrize(
    ("op", "element"),
    [
        (dist.ReduceOp.BAND, "float32"),
        (dist.ReduceOp.MAX, "complex64"),
        (dist.ReduceOp.AVG, "int16"),
        (dist.ReduceOp.AVG, "bool"),
    ],
)
def test_unsupported_reduction_is_rejected(op: dist.ReduceOp.RedOpType, element: str) -> None:
    with pytest.raises(UnsupportedOperation, match=element):
        _of(op, element)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "complex64"])
def test_average_divides_after_the_sum(name: str) -> None:
    reduction = _of(dist.ReduceOp.AVG, name)
    dtype = getattr(torch, name)
    staged, values = torch.full((3,), 8).to(dtype), torch.zeros(3, dtype=dtype)
    reduction.drain(staged, values)
    assert values.tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", ["int32", "int64"])
def test_average_of_integers_drops_the_fraction(name: str) -> None:
    reduction = _of(dist.ReduceOp.AVG, name)
    staged, values = torch.tensor([9, -9, 8]).to(getattr(torch, name)), torch.zeros(3, dtype=torch.int64)
    reduction.drain(staged, values)
    assert values.tolist() == [2, -2, 2]


@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_average_of_narrow_floats_divides_before_the_sum(name: str) -> None:
    dtype = getattr(torch, name)
    max_value = torch.finfo(dtype).max
    values = torch.full((3,), max_value).to(dtype)
    staged = torch.zeros(3, dtype=dtype)
    reduction = _of(dist.ReduceOp.AVG, name, 2)
    reduction.fill(staged, values)
    assert staged.float().tolist() == [max_value / 2] * 3


def test_premul_sum_accepts_number_or_one_element_tensor() -> None:
    for factor in (0.5, torch.tensor([0.5]), torch.tensor(0.5)):
        op = dist._make_nccl_premul_sum(factor)
        staged = torch.zeros(2)
        reduction_of(op, by_name("float32"), 2).fill(staged, torch.tensor([2.0, 4.0]))
        assert staged.tolist() == [1, 2]
    with pytest.raises(UnsupportedOperation):
        reduction_of(dist._make_nccl_premul_sum(0.5), by_name("int64"), 2)
