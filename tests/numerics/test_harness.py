"""The harness itself: it must notice what the suite relies on it to notice."""

from __future__ import annotations

import functools
import operator

import pytest

from tests.numerics.harness import values
from tests.numerics.harness.pool import Pool, PoolError


@pytest.mark.parametrize("dtype", list(values.DTYPES))
def test_inputs_differ_by_rank_call_and_element(dtype: str) -> None:
    for make in (
        lambda *at: values.inputs(dtype, "SUM", 64, *at),
        lambda *at: values.raw_inputs(dtype, 64, *at),
    ):
        base = make(0, 0)
        assert not values.same_bits(base, make(1, 0))
        assert not values.same_bits(base, make(0, 1))
        assert not values.same_bits(base[:32], base[32:])
        assert values.same_bits(base, make(0, 0))


@pytest.mark.parametrize("dtype", list(values.FLOATS))
def test_float_inputs_add_exactly_in_any_order(dtype: str) -> None:
    parts = [values.inputs(dtype, "SUM", 200, rank, 3).float() for rank in range(5)]
    kind = values.DTYPES[dtype]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3]):
        total = parts[order[0]].to(kind)
        for rank in order[1:]:
            total = (total.double() + parts[rank].double()).to(kind)
        wanted = values.reduced(dtype, "SUM", [part.to(kind) for part in parts])
        assert values.same_bits(total, wanted)


@pytest.mark.parametrize("dtype", list(values.INTEGERS))
@pytest.mark.parametrize("operation", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_expected_values_wrap_integers(dtype: str, operation: str) -> None:
    parts = [values.inputs(dtype, operation, 50, rank, 0) for rank in range(5)]
    got = values.reduced(dtype, operation, parts)
    step = {
        "SUM": operator.add,
        "PRODUCT": operator.mul,
        "MIN": min,
        "MAX": max,
        "BAND": operator.and_,
        "BOR": operator.or_,
        "BXOR": operator.xor,
    }[operation]
    bits = 8 * values.DTYPES[dtype].itemsize
    numbers = [part.numpy().tolist() for part in parts]
    for place, result in enumerate(got.numpy().tolist()):
        whole = functools.reduce(step, (part[place] for part in numbers))
        assert result % 2**bits == whole % 2**bits
    assert got.dtype == values.DTYPES[dtype]


@pytest.mark.slow
class TestPool:
    def test_pool_reports_failing_rank_and_trace(self, gloo: Pool) -> None:
        with pytest.raises(PoolError, match=r"rank 2 raised(.|\n)*on purpose"):
            gloo.run("faults:raise_on", world=3, rank=2)

    def test_pool_reports_failed_checks(self, gloo: Pool) -> None:
        with pytest.raises(PoolError, match=r"rank 1: .*noted on purpose"):
            gloo.run("faults:note_on", world=2, rank=1)

    def test_pool_names_hung_rank_and_restarts(self) -> None:
        pool = Pool("gloo")
        try:
            with pytest.raises(PoolError, match=r"rank 1 hung(.|\n)*in sleep_on"):
                pool.run("faults:sleep_on", world=2, seconds=4, rank=1)
            assert pool.run("faults:ranks", world=3) == [0, 1, 2]
            with pytest.raises(PoolError, match="rank 0 died with 9"):
                pool.run("faults:exit_on", world=2, rank=0)
        finally:
            pool.close()
