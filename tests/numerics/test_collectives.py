"""Every collective, type, operation and world of 1 to 5 against the oracle."""

from __future__ import annotations

import pytest

from tests.numerics.harness.pool import Pool
from tests.numerics.harness.values import DTYPES

WORLDS = (1, 2, 3, 4, 5)
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_list")
MOVEMENTS = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
)
QUICK = ("float32", "bfloat16", "int64")


def _slow_unless(quick: bool) -> list[pytest.MarkDecorator]:
    return [] if quick else [pytest.mark.slow]


def _worlds() -> list[object]:
    return [pytest.param(world, marks=_slow_unless(world in (1, 3))) for world in WORLDS]


def _kinds() -> list[object]:
    """Every dtype in groups of one, odd and more; the common ones in all."""
    return [
        pytest.param(dtype, world, marks=_slow_unless(dtype in QUICK and world in (1, 3)))
        for dtype in DTYPES
        for world in WORLDS
        if dtype in QUICK or world % 2
    ]


def _same(digests: list[object]) -> None:
    assert all(digest == digests[0] for digest in digests), f"ranks hold different bits: {digests}"


@pytest.mark.parametrize(("dtype", "world"), _kinds())
@pytest.mark.parametrize("collective", REDUCTIONS)
def test_reduction_matches_expected_values(pool: Pool, collective: str, dtype: str, world: int) -> None:
    results = pool.run(f"reductions:{collective}", world=world, dtype=dtype)
    if collective == "all_reduce":
        _same(results)


@pytest.mark.parametrize(("dtype", "world"), _kinds())
@pytest.mark.parametrize("collective", MOVEMENTS)
def test_movement_matches_expected_values(pool: Pool, collective: str, dtype: str, world: int) -> None:
    pool.run(f"movement:{collective}", world=world, dtype=dtype)


@pytest.mark.parametrize("world", _worlds())
@pytest.mark.parametrize("dtype", ["float32", "int16", "float8_e4m3fn"])
def test_all_gather_accepts_uneven_lists(ours: Pool, dtype: str, world: int) -> None:
    ours.run("movement:all_gather_uneven", world=world, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_sums_that_round(pool: Pool, dtype: str, world: int) -> None:
    _same(pool.run("reductions:all_reduce_rough", world=world, dtype=dtype, sizes=[1, 1009, 70_001]))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_sums_match_expected_values(pool: Pool, dtype: str, world: int) -> None:
    """Below, at and above a mebibyte, where the strategy may change, and some megabytes."""
    sizes = [262_144, 262_145, 700_001]
    _same(pool.run("reductions:all_reduce_rough", world=world, dtype=dtype, sizes=sizes))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_large_movements_match_expected_values(pool: Pool, world: int) -> None:
    pool.run("movement:large", world=world, megabytes=3)


@pytest.mark.parametrize("world", _worlds())
def test_many_calls_in_flight(pool: Pool, world: int) -> None:
    _same(pool.run("reductions:all_reduce_repeated", world=world, size=4099, calls=24))


@pytest.mark.parametrize("world", _worlds())
def test_barrier_waits_for_last_rank(pool: Pool, world: int) -> None:
    pool.run("movement:barrier", world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_average_of_halves_does_not_overflow(ours: Pool, world: int) -> None:
    ours.run("reductions:average_of_large_halves", world=world)


@pytest.mark.parametrize("world", [2, 5])
def test_nan_reaches_all_ranks(ours: Pool, world: int) -> None:
    _same(ours.run("reductions:not_numbers", world=world))


@pytest.mark.parametrize("tensor_factor", [False, True])
@pytest.mark.parametrize("factor", [0.3, -2.0])
def test_premultiplied_sum_matches_expected_values(ours: Pool, factor: float, tensor_factor: bool) -> None:
    ours.run("reductions:premultiplied_by", world=3, factor=factor, tensor_factor=tensor_factor)
