"""Strided, transposed, 0-dim and unlike layouts."""

from __future__ import annotations

import pytest

from tests.numerics.harness.pool import Pool

WORLDS = [1, 3, pytest.param(5, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("body", ["gathers", "scalars"])
def test_tensor_layouts_match_expected_values(pool: Pool, body: str, world: int) -> None:
    pool.run(f"layouts:{body}", world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "body", ["in_place", "scatters", "unlike_layouts", "negated_and_conjugated", "large_views"]
)
def test_tensor_layouts_unsupported_by_gloo(ours: Pool, body: str, world: int) -> None:
    ours.run(f"layouts:{body}", world=world)
