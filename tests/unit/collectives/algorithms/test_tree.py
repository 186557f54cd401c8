"""Tree arithmetic: every rank agrees with its parent and its children."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.collectives.algorithms import tree


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, int, int]:
    world = draw(st.integers(1, 200))
    return world, draw(st.integers(0, world - 1)), draw(st.integers(2, 8))


@settings(max_examples=150, deadline=None)
@given(trees())
def test_parents_and_children_agree(shape: tuple[int, int, int]) -> None:
    world, root, arity = shape
    claimed: dict[int, int] = {}
    for rank in range(world):
        below = tree.children(rank, root, world, arity)
        assert len(below) <= arity
        for child in below:
            assert child not in claimed, "two parents for one rank"
            claimed[child] = rank
            assert tree.parent(child, root, world, arity) == rank
    assert sorted([*claimed, root]) == list(range(world)), "a rank without a parent"
    assert tree.parent(root, root, world, arity) is None


@settings(max_examples=150, deadline=None)
@given(trees())
def test_parents_come_before_their_children_and_paths_end_at_the_root(shape: tuple[int, int, int]) -> None:
    world, root, arity = shape
    longest = 0
    for rank in range(world):
        steps, at = 0, rank
        while (above := tree.parent(at, root, world, arity)) is not None:
            assert tree.virtual_rank(above, root, world) < tree.virtual_rank(at, root, world)
            steps, at = steps + 1, above
        assert at == root
        longest = max(longest, steps)
    assert longest == tree.depth(world, arity)


def test_every_small_tree_exhaustively() -> None:
    for world in range(1, 25):
        for arity in range(2, 9):
            for virtual in range(world):
                for child in tree.virtual_children(virtual, arity, world):
                    assert virtual < child < world
                    assert tree.virtual_parent(child, arity) == virtual


@pytest.mark.parametrize(
    ("world", "arity", "depth"),
    [(1, 2, 0), (2, 2, 1), (3, 2, 1), (4, 2, 2), (8, 2, 3), (5, 4, 1), (64, 8, 2)],
)
def test_depth_matches_longest_path(world: int, arity: int, depth: int) -> None:
    assert tree.depth(world, arity) == depth


@given(st.integers(1, 200), st.data())
def test_virtual_ranks_are_a_renumbering(world: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world - 1))
    numbers = [tree.virtual_rank(rank, root, world) for rank in range(world)]
    assert sorted(numbers) == list(range(world))
    assert numbers[root] == 0
    assert [tree.real_rank(number, root, world) for number in numbers] == list(range(world))
