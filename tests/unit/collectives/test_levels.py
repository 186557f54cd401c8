"""What is fixed by level decides what a group does, and only that."""

from __future__ import annotations

import pytest

from barnraise.collectives.algorithms import named, read_name
from barnraise.collectives.algorithms.cost_model import CostTable, choose
from barnraise.collectives.algorithms.schedule import SHAPES, BufferShapes, StepKind
from barnraise.collectives.levels import setting_for, shapes_of
from barnraise.planning import Level, Levels

FREE = Levels()
STAR = Levels(inside=Level(all_reduce="star", broadcast="tree"))
APART = Levels(inside=Level(all_reduce="star", reduce="star"), across=Level(all_reduce="tree"))


@pytest.mark.parametrize(
    ("kind", "levels", "sites", "expected"),
    [
        (StepKind.ALL_REDUCE, FREE, 2, "general"),
        (StepKind.ALL_REDUCE, STAR, 1, "star"),
        (StepKind.ALL_REDUCE, STAR, 2, "star"),
        (StepKind.ALL_REDUCE, APART, 1, "star"),
        (StepKind.ALL_REDUCE, APART, 2, "sites"),
        (StepKind.REDUCE, STAR, 2, "general"),
        (StepKind.REDUCE, APART, 2, "star"),
        (StepKind.BROADCAST, STAR, 0, "tree"),
        (StepKind.ALL_GATHER, APART, 2, "general"),
    ],
)
def test_what_is_set_for_an_operation(kind: StepKind, levels: Levels, sites: int, expected: str) -> None:
    assert setting_for(kind, levels, "general", sites) == expected


def test_shapes_are_chains_and_a_ring_unless_fixed() -> None:
    assert shapes_of(FREE) == BufferShapes("ring", "ring", "ring")
    assert shapes_of(APART) == BufferShapes("star", "tree", "ring")


def test_names_are_read_as_they_were_written() -> None:
    assert named("sites", BufferShapes()) == "sites"
    assert named("ring", BufferShapes("star", "star", "star")) == "ring"
    for shapes in (BufferShapes(a, b, c) for a in SHAPES for b in SHAPES for c in SHAPES):
        assert read_name(named("sites", shapes)) == ("sites", shapes)


def test_what_shapes_cost() -> None:
    """Leaders of a star hear everybody; a site's star is nearer than its chain."""

    def seconds(nbytes: int, shapes: BufferShapes, leaders: int = 4) -> float:
        table = CostTable.default()
        return choose(StepKind.ALL_REDUCE, nbytes, 16, table, "sites", leaders=leaders, shapes=shapes).seconds

    large, small = 64 << 20, 1 << 10
    assert seconds(large, BufferShapes(across="star")) > 1.5 * seconds(large, BufferShapes())
    assert seconds(small, BufferShapes(across="star")) < seconds(small, BufferShapes())
    assert seconds(small, BufferShapes("star", "ring", "star")) < seconds(small, BufferShapes())
    assert seconds(small, BufferShapes("tree", "tree", "tree"), leaders=1) > 0
