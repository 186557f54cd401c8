"""Device meshes for FSDP2: the smallest shard groups with enough memory, over the fastest links."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import RunError
from barnraise.planning.cost.mesh_layout import MeshRank, choose_mesh, traffic_of_step

GB = 1 << 30


def rates(**mbps: float) -> dict[frozenset[str], float]:
    return {frozenset(pair): rate for pair, rate in mbps.items()}


def ranks_of(machines: str, memory: int = 0) -> list[MeshRank]:
    return [MeshRank(machine, memory) for machine in machines]


def test_machine_with_several_ranks_is_a_shard_group() -> None:
    layout = choose_mesh(ranks_of("aabb"), {}, 0)
    assert layout.shard_groups == ((0, 1), (2, 3))
    assert "2 ranks of one machine share the shards" in layout.why


def test_machines_with_one_rank_are_one_shard_group() -> None:
    layout = choose_mesh(ranks_of("abc"), rates(ab=940.0, bc=100.0, ac=940.0), 0)
    assert layout.shard_groups == ((0, 1, 2),)
    assert "100 Mbit/s" in layout.why


def test_state_that_fits_everywhere_is_replicated() -> None:
    layout = choose_mesh(ranks_of("abcd", 8 * GB), {}, 6 * GB)
    assert layout.shard_groups == ((0,), (1,), (2,), (3,))
    assert "only gradients travel" in layout.why


def test_shard_groups_take_the_fastest_links() -> None:
    links = rates(ad=9000.0, bc=9000.0, ab=900.0, cd=900.0, ac=900.0, bd=900.0)
    layout = choose_mesh(ranks_of("abcd", 8 * GB), links, 12 * GB)
    assert layout.shard_groups == ((0, 3), (1, 2))
    assert "9000 Mbit/s" in layout.why
    assert "2 groups of them hold replicas" in layout.why


def test_group_grows_beyond_a_machine_only_if_it_must() -> None:
    inside = choose_mesh(ranks_of("aabb", 8 * GB), {}, 12 * GB)
    assert inside.shard_groups == ((0, 1), (2, 3))
    across = choose_mesh(ranks_of("aabb", 8 * GB), {}, 20 * GB)
    assert across.shard_groups == ((0, 1, 2, 3),)


def test_unequal_machines_share_all_or_nothing() -> None:
    assert choose_mesh(ranks_of("aab", 8 * GB), {}, 12 * GB).shard_groups == ((0, 1, 2),)


def test_small_rank_decides_the_size() -> None:
    ranks = [MeshRank("a", 16 * GB), MeshRank("b", 4 * GB), MeshRank("c", 16 * GB), MeshRank("d", 16 * GB)]
    assert choose_mesh(ranks, {}, 12 * GB).shard_groups == ((0, 1, 2, 3),)


def test_too_large_state_is_refused_with_both_sizes() -> None:
    with pytest.raises(RunError, match="40 GiB of state do not fit into the 24 GiB"):
        choose_mesh(ranks_of("abc", 8 * GB), {}, 40 * GB)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=9), st.integers(0, 40))
def test_each_rank_is_in_exactly_one_group_of_equal_size(rooms: list[int], needs: int) -> None:
    ranks = [MeshRank(f"m{place}", GB) for place, count in enumerate(rooms) for _ in range(count)]
    try:
        groups = choose_mesh(ranks, {}, needs * GB).shard_groups
    except RunError:
        assert needs > len(ranks)
        return
    assert sorted(rank for group in groups for rank in group) == list(range(len(ranks)))
    assert len({len(group) for group in groups}) == 1
    assert len(groups[0]) >= needs


def test_traffic_of_a_step() -> None:
    assert traffic_of_step(1, 1, 16, 16) == (0.0, 0.0)
    sharded, replicated = traffic_of_step(1, 4, 16, 8)
    assert (sharded, replicated) == (0.75 * 40, 0.0)
    assert traffic_of_step(2, 2, 16, 8) == (20.0, 4.0)


def test_table_in_the_docs_is_computed() -> None:
    rates_of_links = {"1 Gbit/s": 1e9, "2.5 Gbit/s": 2.5e9, "10 Gbit/s": 1e10, "40 Gbit/s": 4e10}
    size = 16_000_000_000
    lines = [
        f"| Machines | Trained | Received | {' | '.join(rates_of_links)} |",
        "|---|---|---|---|---|---|---|",
    ]
    for machines in (2, 4):
        for trained, gradient_bytes in (("LoRA", 0), ("all", size)):
            received = sum(traffic_of_step(1, machines, size, gradient_bytes))
            seconds = [f"{8 * received / rate:.0f} s" for rate in rates_of_links.values()]
            lines.append(f"| {machines} | {trained} | {received / 1e9:.0f} GB | {' | '.join(seconds)} |")
    docs = Path(__file__).parents[4].joinpath("docs", "sharded.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in docs, "\n".join(lines)
