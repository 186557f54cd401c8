"""Ranks that are threads compute what processes compute, to the last bit, and fail with the same errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.numerics.harness.pool import Pool
from tests.numerics.harness.simulated import run_simulated
from tests.numerics.test_algorithms import ALGORITHMS
from tests.numerics.test_disagreements import CASES

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_list")
MOVEMENTS = (
    "broadcast",
    "all_gather",
    "all_gather_uneven",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
)
OTHERS = (
    "groups:sub_groups",
    "groups:enumerated",
    "groups:interleaved",
    "groups:futures",
    "groups:many_kinds_in_flight",
    "objects:everything",
    "functional:plain",
    "functional:coalesced",
    "functional:coalesced_in_place",
    "functional:differentiable",
    "layouts:in_place",
    "layouts:gathers",
    "layouts:scatters",
    "layouts:scalars",
    "movement:barrier",
    "point_to_point:tags_out_of_order",
    "point_to_point:same_tag_keeps_order",
    "point_to_point:any_source",
    "point_to_point:batch",
    "point_to_point:strided_receive",
    "disagreements:monitored_barrier_passes",
)


@pytest.mark.parametrize("world", [3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_that_round_have_bits_of_processes(
    ours: Pool, algorithm: str, world: int, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "algorithm": algorithm,
        "segment_bytes": 16 * 1024,
        "inner": "reductions:all_reduce_rough",
        "arguments": {"dtype": "float32", "sizes": [1009, 70_001]},
    }
    processes = ours.run("algorithms:under", world=world, **arguments)
    assert run_simulated("algorithms:under", tmp_path, world=world, **arguments) == processes


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), "int64"])
@pytest.mark.parametrize(
    "body", [*(f"reductions:{name}" for name in REDUCTIONS), *(f"movement:{name}" for name in MOVEMENTS)]
)
def test_collective_matches_expected_values(body: str, dtype: str, tmp_path: Path) -> None:
    run_simulated(body, tmp_path, world=3, dtype=dtype)


@pytest.mark.parametrize("body", OTHERS)
def test_other_operations_match_expected_values(body: str, tmp_path: Path) -> None:
    run_simulated(body, tmp_path)


def test_large_operations_match_expected_values(tmp_path: Path) -> None:
    run_simulated("movement:large", tmp_path, world=3, megabytes=3)
    run_simulated("point_to_point:large", tmp_path, world=2, megabytes=3)


@pytest.mark.parametrize("case", CASES)
def test_disagreement_raises_on_every_rank(case: str, tmp_path: Path) -> None:
    for message in run_simulated("disagreements:raises_everywhere", tmp_path, case=case):
        assert message.startswith("OperationMismatch"), message
        assert "rank 1 " in message, f"the differing rank is not named: {message}"


def test_monitored_barrier_names_missing_ranks(tmp_path: Path) -> None:
    messages = run_simulated("disagreements:monitored_barrier_names", tmp_path, missing=[1, 3])
    for rank in (0, 2, 4):
        assert "rank 1, rank 3 alive but late" in messages[rank]
