"""Ranks by site: from measured links, or by machine; empty if there is only one site."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from barnraise.planning.cost.rank_layout import ranks_by_site
from barnraise.topology.graph import LinkFacts, NodeFacts, TopologyGraph, build_graph


def _graph(names: str, rate: Callable[[str, str], float | None]) -> TopologyGraph:
    links = [LinkFacts(a=a, b=b, rtt_s=0.001, mbps=rate(a, b)) for a, b in combinations(names, 2)]
    return build_graph([NodeFacts(node=name, name=f"m{name}") for name in names], links)


def _two_sites(a: str, b: str) -> float:
    if (a in "ab") == (b in "ab"):
        return 940.0
    return 21.0 if "b" in (a, b) else 19.0


def test_machines_of_a_site_are_grouped_and_the_best_link_leads() -> None:
    graph = _graph("abcd", _two_sites)
    assert ranks_by_site(graph, ["a", "b", "c", "d"]).sites == ((1, 0), (2, 3))
    assert ranks_by_site(graph, ["c", "a", "d", "b"]).sites == ((3, 1), (0, 2))


def test_workers_of_a_machine_are_adjacent_in_its_site() -> None:
    assert ranks_by_site(_graph("abc", _two_sites), ["a", "b", "c", "a", "b", "c"]).sites == (
        (1, 4, 0, 3),
        (2, 5),
    )


def test_workers_of_a_machine_are_a_site_on_one_network() -> None:
    graph = _graph("ab", lambda a, b: 940.0)
    assert not ranks_by_site(graph, ["a", "a", "b", "b"]).are_places
    assert ranks_by_site(_graph("abcd", _two_sites), ["a", "b", "c", "d"]).are_places
    assert ranks_by_site(graph, ["a", "a", "b", "b"]).sites == ((0, 1), (2, 3))


def test_layout_is_empty_for_equal_machines() -> None:
    alike = _graph("abcd", lambda a, b: 940.0 if a == "a" else 700.0)
    assert ranks_by_site(alike, ["a", "b", "c", "d"]).sites == ()
    assert ranks_by_site(alike, ["a", "a", "a"]).sites == ()
    each_far = _graph("abcd", lambda a, b: 20.0)
    assert ranks_by_site(each_far, ["a", "b", "c", "d"]).sites == ()


def test_ring_uses_the_fast_links() -> None:
    fast = ("ac", "bc", "bd", "ad")
    graph = _graph("abcd", lambda a, b: 940.0 if a + b in fast else 300.0)
    assert ranks_by_site(graph, ["a", "b", "c", "d"]).sites == ((0, 3, 1, 2),)
    assert ranks_by_site(graph, ["a", "c", "b", "d"]).sites == (), "by rank it is as fast"
    nearly = _graph("abcd", lambda a, b: 940.0 if a + b in fast else 900.0)
    assert ranks_by_site(nearly, ["a", "b", "c", "d"]).sites == ()


def test_sites_are_in_the_order_of_their_ring() -> None:
    def rate(a: str, b: str) -> float:
        first, second = sorted(("abcdefgh".index(a) // 2, "abcdefgh".index(b) // 2))
        if first == second:
            return 940.0
        return 5.0 if (first, second) in ((0, 1), (2, 3)) else 20.0

    sites = ranks_by_site(_graph("abcdefgh", rate), list("abcdefgh")).sites
    assert [site[0] // 2 for site in sites] == [0, 3, 1, 2]
    assert sorted(map(sorted, sites)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_unmeasured_links_are_ignored() -> None:
    graph = _graph("abcd", lambda a, b: None if (a, b) == ("a", "c") else _two_sites(a, b))
    assert ranks_by_site(graph, ["a", "b", "c", "d"]).sites == ()
    assert ranks_by_site(TopologyGraph(), ["a", "b", "c", "d"]).sites == ()
