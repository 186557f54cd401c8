"""Pools for all of these tests, one per backend, and the two backends every test is asked about."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.numerics.harness.pool import Pool

BACKENDS = ("gloo", "barnraise")


_CONTROL_WORLDS = (1, 3)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gloo is there to show that the expectations are right; of large tables two sizes suffice for that."""
    left: list[pytest.Item] = []
    out: list[pytest.Item] = []
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        is_table = item.name.startswith(("test_movement[", "test_reduction["))
        is_more = given.get("pool") == "gloo" and given.get("world") not in _CONTROL_WORLDS
        (out if is_table and is_more else left).append(item)
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = left


@pytest.fixture(scope="package")
def pools() -> Iterator[dict[str, Pool]]:
    made = {name: Pool(name) for name in BACKENDS}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(params=[pytest.param("gloo", marks=pytest.mark.slow), "barnraise"])
def pool(request: pytest.FixtureRequest, pools: dict[str, Pool]) -> Pool:
    return pools[request.param]


@pytest.fixture
def ours(pools: dict[str, Pool]) -> Pool:
    """Only our backend: for what Gloo gets wrong or cannot do."""
    return pools["barnraise"]


@pytest.fixture
def gloo(pools: dict[str, Pool]) -> Pool:
    return pools["gloo"]
