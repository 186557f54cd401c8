"""Pools for the whole session, one per backend, and the two backends every test is asked about."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.numerics.harness.pool import Pool

BACKENDS = ("gloo", "backyard")


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[str, Pool]]:
    made = {name: Pool(name) for name in BACKENDS}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(params=[pytest.param("gloo", marks=pytest.mark.slow), "backyard"])
def pool(request: pytest.FixtureRequest, pools: dict[str, Pool]) -> Pool:
    return pools[request.param]


@pytest.fixture
def ours(pools: dict[str, Pool]) -> Pool:
    """Only our backend: for what Gloo gets wrong or cannot do."""
    return pools["backyard"]


@pytest.fixture
def gloo(pools: dict[str, Pool]) -> Pool:
    return pools["gloo"]
