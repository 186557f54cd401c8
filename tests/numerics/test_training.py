"""torch's training layers, unchanged, against single-process training."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numerics.bodies.training import VARIANTS
from tests.numerics.harness.pool import Pool

pytestmark = pytest.mark.slow

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
)


def _same(digests: list[Any]) -> None:
    present = [digest for digest in digests if digest is not None]
    assert all(digest == present[0] for digest in present), f"replicas differ: {digests}"


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_ddp_matches_single_process(pool: Pool, options: dict[str, Any], world: int) -> None:
    _same(pool.run("training:ddp", world=world, options=options))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_ddp_variant_matches_single_process(pool: Pool, name: str, world: int) -> None:
    _same(pool.run("training:variant", world=world, name=name))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world", [2, 4, 5])
def test_fsdp2_matches_single_process(pool: Pool, world: int, reshard: bool) -> None:
    _same(pool.run("sharding:fsdp", sharded_over=world, reshard=reshard))


@pytest.mark.parametrize("body", ["hsdp", "fsdp_bfloat16", "fsdp_accumulated_and_clipped", "mesh_groups"])
def test_fsdp2_variant_matches_single_process(pool: Pool, body: str) -> None:
    _same(pool.run(f"sharding:{body}"))


@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel_matches_single_process(pool: Pool, world: int) -> None:
    _same(pool.run("sharding:tensor_parallel", sharded_over=world))


def test_fsdp2_with_tensor_parallel(pool: Pool) -> None:
    _same(pool.run("sharding:fsdp_with_tensor_parallel"))


@pytest.mark.parametrize("shape", [[2], [4], [5], [2, 2]])
def test_dtensor_redistribute_keeps_values(pool: Pool, shape: list[int]) -> None:
    pool.run("sharding:redistribute", shape=shape)


@pytest.mark.parametrize("world", [2, 5])
def test_dtensor_partial_sums_are_exact(pool: Pool, world: int) -> None:
    pool.run("sharding:partial", sharded_over=world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_pipeline_matches_single_process(pool: Pool, schedule: str, world: int) -> None:
    pool.run("pipelines:run", world=world, schedule=schedule)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_checkpoint_saved_by_four_loads_on_two(pool: Pool, asynchronous: bool) -> None:
    directory = f"checkpoint-{asynchronous}"
    pool.run("checkpoints:save", directory=directory, seed=3, asynchronous=asynchronous)
    pool.run("checkpoints:load", directory=directory, seed=3)


def test_drifting_replicas_are_equal_after_every_nth_step(pool: Pool) -> None:
    by_rank = [digests for digests in pool.run("training:drifting_replicas", world=3, every=4) if digests]
    assert len(by_rank) == 3
    equal = [len(set(digests)) == 1 for digests in zip(*by_rank, strict=True)]
    assert equal == [False, False, False, True] * 2
