"""Rank layout of a group: which ranks are at one site, and their order in a ring. Pure.

An all-reduce through sites crosses between them only once. A ring avoids slow links where possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from barnraise.planning.cost.link_matrix import LinkMatrix, are_sites_separate, find_sites
from barnraise.planning.cost.rings import ring_order
from barnraise.planning.inputs.cluster import PlanCluster, cluster_from_graph
from barnraise.planning.inputs.inputs import ModelSize
from barnraise.topology.graph import TopologyGraph, build_graph

Sites = tuple[tuple[int, ...], ...]

_CHUNK_BYTES = 1 << 20  # size of a hop for which ring orders are compared
_MIN_GAIN = 0.9  # a new order must cut the slowest hop to this share of its time


class _Measured(NamedTuple):
    """Machines of which every pair has been measured."""

    cluster: PlanCluster
    links: LinkMatrix

    def ring(self, members: Sequence[int]) -> list[int]:
        """Return the members in the order of the best ring, if it is clearly better than the given order."""
        costs = self.links.hop_costs(members, _CHUNK_BYTES)
        best = ring_order(costs)

        def slowest(order: Sequence[int]) -> float:
            return max(float(costs[order[index - 1], member]) for index, member in enumerate(order))

        is_better = slowest(best) < _MIN_GAIN * slowest(range(len(members)))
        return [members[index] for index in best] if is_better else list(members)


class RankLayout(NamedTuple):
    """Ranks of each site along its chain, the leader first.

    ``are_places``: True if the sites are places; False if each is one machine.
    """

    sites: Sites = ()
    are_places: bool = False


def ranks_by_site(graph: TopologyGraph, nodes: Sequence[str]) -> RankLayout:
    """Return the ranks of each site; a ring uses them in this order.

    ``nodes``: the machine of each rank. Sites come from the measured links. If all machines are at one site,
    the ranks of one machine form a site. With a single site only the order matters. Return an empty layout
    if nothing is known.
    """
    machines = list(dict.fromkeys(nodes))
    ranks = {machine: [rank for rank, node in enumerate(nodes) if node == machine] for machine in machines}
    measured = _measured(graph, machines)
    sites = [machines] if measured is None else _sites_of_machines(measured)
    are_places = len(sites) > 1
    if not are_places:
        sites = [[machine] for machine in _ring_of_machines(measured, machines)]
    ranks_of_sites = tuple(tuple(rank for machine in site for rank in ranks[machine]) for site in sites)
    if 1 < len(ranks_of_sites) < len(nodes):
        return RankLayout(ranks_of_sites, are_places)
    order = tuple(rank for site in ranks_of_sites for rank in site)
    return RankLayout() if order == tuple(range(len(nodes))) else RankLayout((order,))


def _measured(graph: TopologyGraph, machines: Sequence[str]) -> _Measured | None:
    there = build_graph([facts for facts in graph.nodes if facts.node in machines], graph.links)
    known = [link for link in there.links if link.mbps is not None]
    if len(there.nodes) < len(machines) or len(known) < len(machines) * (len(machines) - 1) // 2:
        return None
    cluster = cluster_from_graph(there, ModelSize(parameters=1), dict.fromkeys(machines, 1.0))
    return _Measured(cluster, LinkMatrix(cluster))


def _ring_of_machines(measured: _Measured | None, machines: Sequence[str]) -> list[str]:
    if measured is None:
        return list(machines)
    numbers = {member.node: number for number, member in enumerate(measured.cluster.members)}
    order = measured.ring([numbers[machine] for machine in machines])
    return [measured.cluster.members[member].node for member in order]


def _sites_of_machines(measured: _Measured) -> list[list[str]]:
    """Return the sites in the order of a ring; the leader of each has the fastest link to another site."""
    cluster, links = measured
    sites = find_sites(cluster, links)
    if not are_sites_separate(sites, links):
        return [[member.node for member in cluster.members]]

    def outward(site: tuple[int, ...], member: int) -> float:
        return max(
            (links.slower_rate(member, other) for group in sites if group != site for other in group),
            default=0,
        )

    chains = {
        chain[0]: chain
        for chain in (sorted(site, key=lambda member: -outward(site, member)) for site in sites)
    }
    return [
        [cluster.members[member].node for member in chains[leader]] for leader in measured.ring([*chains])
    ]
