"""An operation's specification says everything that its program is made from."""

from __future__ import annotations

import pytest

from barnraise.collectives.algorithms.compile import compile_operation
from barnraise.collectives.messages import OperationSpec
from barnraise.core.errors import ConfigError

FLOAT32 = 8


def _specification(algorithm: str, sites: tuple[tuple[int, ...], ...]) -> OperationSpec:
    return OperationSpec("all_reduce", FLOAT32, "sum", -1, algorithm, (4096,), 1024, 2, sites)


@pytest.mark.parametrize(
    ("sites", "following"),
    [((), [1, 2, 3, 0]), (((0, 2, 1, 3),), [2, 3, 1, 0]), (((0, 2), (3, 1)), [2, 0, 3, 1])],
    ids=["by rank", "one site", "two sites"],
)
def test_ring_follows_order_of_sites(sites: tuple[tuple[int, ...], ...], following: list[int]) -> None:
    for rank in range(4):
        schedule = compile_operation(_specification("ring", sites), rank, 4, None).steps
        assert {send.peer for send in schedule.sends} == {following[rank]}


@pytest.mark.parametrize(
    ("algorithm", "peers"),
    [
        ("sites", [{1, 4}, {0, 2}, {1, 3}, {2}, {0, 5}, {4}]),
        ("sites:star/ring/star", [{1, 2, 3, 4}, {0}, {0}, {0}, {0, 5}, {4}]),
        ("sites:tree/star/tree", [{1, 2, 4}, {0, 3}, {0}, {1}, {0, 5}, {4}]),
        ("sites:ring/tree/star", [{1, 2, 3, 4}, {0, 2}, {1, 3, 0}, {2, 0}, {0, 5}, {4}]),
    ],
)
def test_label_sets_shapes_of_sites(algorithm: str, peers: list[set[int]]) -> None:
    for rank in range(6):
        specification = _specification(algorithm, ((0, 1, 2, 3), (4, 5)))
        assert compile_operation(specification, rank, 6, None).peers == peers[rank]


def test_unknown_shape_is_rejected() -> None:
    with pytest.raises(ConfigError, match="has no shape 'rign'"):
        compile_operation(_specification("sites:ring/rign/ring", ((0, 1), (2, 3))), 0, 4, None)


def test_order_without_every_rank_is_rejected() -> None:
    with pytest.raises(ConfigError, match="does not name each of 4 ranks once"):
        compile_operation(_specification("ring", ((0, 1, 2),)), 0, 4, None)
