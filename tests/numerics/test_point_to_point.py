"""Sends and receives."""

from __future__ import annotations

import pytest

from tests.numerics.harness.pool import Pool
from tests.numerics.harness.values import DTYPES


@pytest.mark.parametrize("world", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_pair_exchanges_messages(pool: Pool, dtype: str, world: int) -> None:
    pool.run("point_to_point:every_pair", world=world, dtype=dtype)


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("body", ["tags_out_of_order", "same_tag_keeps_order", "any_source", "batch"])
def test_message_order_and_source_are_kept(pool: Pool, body: str, world: int) -> None:
    pool.run(f"point_to_point:{body}", world=world)


def test_large_messages_are_delivered(pool: Pool) -> None:
    pool.run("point_to_point:large", world=3, megabytes=8)


def test_strided_tensors_are_delivered(ours: Pool) -> None:
    ours.run("point_to_point:strided_receive", world=2)
