"""Every strategy gives the same answers, also cut into many small segments."""

from __future__ import annotations

import pytest

from tests.numerics.harness.pool import Pool

pytestmark = pytest.mark.slow

ALGORITHMS = ("ring", "tree", "doubling", "exchange", "direct", "star", "plain")
EXACT = (
    "reductions:all_reduce",
    "reductions:reduce",
    "reductions:reduce_scatter_tensor",
    "reductions:reduce_scatter_list",
    "movement:broadcast",
    "movement:all_gather",
    "movement:gather",
    "movement:scatter",
    "movement:all_to_all_single",
)


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_small_operations_match_expectation(ours: Pool, algorithm: str, world: int) -> None:
    for body in EXACT:
        options = {"algorithm": algorithm, "segment_bytes": 1024, "inner": body}
        ours.run("algorithms:under", world=world, arguments={"dtype": "float32"}, **options)


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_large_operations_in_many_segments(ours: Pool, algorithm: str, world: int) -> None:
    options = {"algorithm": algorithm, "segment_bytes": 16 * 1024}
    sums = {"dtype": "float32", "sizes": [70_001, 500_009]}
    digests = ours.run(
        "algorithms:under", world=world, inner="reductions:all_reduce_rough", arguments=sums, **options
    )
    assert all(digest == digests[0] for digest in digests), f"ranks hold different bits: {digests}"
    ours.run("algorithms:under", world=world, inner="movement:large", arguments={"megabytes": 1}, **options)


@pytest.mark.parametrize("across", ["ring", "tree", "star"])
@pytest.mark.parametrize("inside", [("ring", "ring"), ("tree", "star"), ("star", "tree")])
def test_hierarchical_sum_with_configured_shapes(ours: Pool, inside: tuple[str, str], across: str) -> None:
    """Five ranks at three sites; another group of one site takes what is fixed inside."""
    reduce, broadcast = inside
    levels = {
        "inside": {"reduce": reduce, "broadcast": broadcast, "all_reduce": "star"},
        "across": {"all_reduce": across},
    }
    sums = {"dtype": "float32", "sizes": [70_001, 500_009]}
    for sites, taken in (([[3, 0, 4], [1], [2]], "sites"), ([[0, 1, 2, 3, 4]], "star")):
        results = ours.run(
            "algorithms:by_level",
            world=5,
            sites=sites,
            levels=levels,
            inner="reductions:all_reduce_rough",
            arguments=sums,
        )
        assert all(strategies == [taken] for _, strategies in results), results
        assert len({str(digest) for digest, _ in results}) == 1, f"ranks hold different bits: {results}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_operations_in_flight(ours: Pool, algorithm: str) -> None:
    arguments = {"size": 4099, "calls": 16}
    ours.run(
        "algorithms:under",
        algorithm=algorithm,
        segment_bytes=1024,
        inner="reductions:all_reduce_repeated",
        arguments=arguments,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"strategy": "tree", "arity": 3}, "tree"),
        ({"strategy": "centralized"}, "star"),
        ({"strategy": "doubling", "timeout": 100}, "doubling"),
    ],
)
def test_block_names_the_algorithm_of_its_calls(
    ours: Pool, options: dict[str, object], expected: str
) -> None:
    sums = {"dtype": "float32", "sizes": [1000, 70_001]}
    inner = "reductions:all_reduce_rough"
    results = ours.run("algorithms:in_block", world=4, options=options, inner=inner, arguments=sums)
    assert all(taken == [expected] for _, taken in results), results
    assert len({str(digest) for digest, _ in results}) == 1, f"ranks hold different bits: {results}"


@pytest.mark.parametrize("sites", [[[3, 0, 4], [1], [2]], [[1, 0], [4, 2, 3]], [[0, 1, 2, 3, 4]]])
def test_operations_through_leaders_of_sites(ours: Pool, sites: list[list[int]]) -> None:
    for body in ("reductions:all_reduce", "reductions:reduce", "movement:broadcast"):
        arguments = {"dtype": "float32"}
        ours.run("algorithms:through_sites", sites=sites, inner=body, arguments=arguments)
    ours.run("algorithms:through_sites", sites=sites, inner="movement:barrier", arguments={})
    arguments = {"megabytes": 1}
    ours.run("algorithms:through_sites", sites=sites, inner="movement:large", arguments=arguments)
