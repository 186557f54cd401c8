"""Settings by network level decide on the algorithms of a group, and on nothing else."""

from __future__ import annotations

import pytest

from barnraise.collectives.algorithms.compile import format_label, parse_label
from barnraise.collectives.algorithms.cost_model import CostTable, choose
from barnraise.collectives.algorithms.schedule import SHAPES, OperationKind, StageShapes
from barnraise.collectives.levels import algorithm_setting, shapes_of
from barnraise.planning import Level, Levels

FREE = Levels()
STAR = Levels(inside=Level(all_reduce="star", broadcast="tree"))
APART = Levels(inside=Level(all_reduce="star", reduce="star"), across=Level(all_reduce="tree"))


@pytest.mark.parametrize(
    ("kind", "levels", "sites", "expected"),
    [
        (OperationKind.ALL_REDUCE, FREE, 2, "general"),
        (OperationKind.ALL_REDUCE, STAR, 1, "star"),
        (OperationKind.ALL_REDUCE, STAR, 2, "star"),
        (OperationKind.ALL_REDUCE, APART, 1, "star"),
        (OperationKind.ALL_REDUCE, APART, 2, "sites"),
        (OperationKind.REDUCE, STAR, 2, "general"),
        (OperationKind.REDUCE, APART, 2, "star"),
        (OperationKind.BROADCAST, STAR, 0, "tree"),
        (OperationKind.ALL_GATHER, APART, 2, "general"),
    ],
)
def test_algorithm_setting_by_level(kind: OperationKind, levels: Levels, sites: int, expected: str) -> None:
    assert algorithm_setting(kind, levels, "general", sites) == expected


def test_shapes_default_to_chains_and_ring() -> None:
    assert shapes_of(FREE) == StageShapes("ring", "ring", "ring")
    assert shapes_of(APART) == StageShapes("star", "tree", "ring")


def test_label_round_trip_keeps_algorithm_and_shapes() -> None:
    assert format_label("sites", StageShapes()) == "sites"
    assert format_label("ring", StageShapes("star", "star", "star")) == "ring"
    for shapes in (StageShapes(a, b, c) for a in SHAPES for b in SHAPES for c in SHAPES):
        assert parse_label(format_label("sites", shapes)) == ("sites", shapes)


def test_predicted_cost_depends_on_shapes() -> None:
    """Leaders of a star hear every rank; a site's star is nearer than its chain."""

    def seconds(nbytes: int, shapes: StageShapes, leaders: int = 4) -> float:
        table = CostTable.default()
        return choose(
            OperationKind.ALL_REDUCE, nbytes, 16, table, "sites", leaders=leaders, shapes=shapes
        ).seconds

    large, small = 64 << 20, 1 << 10
    assert seconds(large, StageShapes(across="star")) > 1.5 * seconds(large, StageShapes())
    assert seconds(small, StageShapes(across="star")) < seconds(small, StageShapes())
    assert seconds(small, StageShapes("star", "ring", "star")) < seconds(small, StageShapes())
    assert seconds(small, StageShapes("tree", "tree", "tree"), leaders=1) > 0
