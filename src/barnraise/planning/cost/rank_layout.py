"""Which ranks of a group are at one place, and in which order sums go around. Pure.

A sum that goes through places crosses between them only once; one that goes around avoids the slow links
where it can.
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

_PIECE_BYTES = 1 << 20  # of a ring's hop, for which orders are compared
_WORTH = 0.9  # an order whose slowest hop takes longer than this, of what it takes by rank, is left as it is


class _Measured(NamedTuple):
    """Machines of which every pair has been measured."""

    cluster: PlanCluster
    wires: LinkMatrix

    def around(self, members: Sequence[int]) -> list[int]:
        """In the order of the best ring, if it is clearly better than the given one."""
        costs = self.wires.hop_costs(members, _PIECE_BYTES)
        best = ring_order(costs)

        def slowest(order: Sequence[int]) -> float:
            return max(float(costs[order[place - 1], one]) for place, one in enumerate(order))

        is_better = slowest(best) < _WORTH * slowest(range(len(members)))
        return [members[place] for place in best] if is_better else list(members)


class RankLayout(NamedTuple):
    """Those of each site along its chain, the leader first. ``are_places``: or is each but one machine?"""

    sites: Sites = ()
    are_places: bool = False


def ranks_by_site(graph: TopologyGraph, nodes: Sequence[str]) -> RankLayout:
    """The ranks of each site; sums that go around take them in this order.

    ``nodes``: the machine of each rank. Machines of one site, by the measured links; if all are at one, the
    ranks of one machine. A single site: only the order matters. Empty where there is nothing to tell.
    """
    machines = list(dict.fromkeys(nodes))
    ranks = {machine: [rank for rank, node in enumerate(nodes) if node == machine] for machine in machines}
    measured = _measured(graph, machines)
    sites = [machines] if measured is None else _sites_of_machines(measured)
    are_places = len(sites) > 1
    if not are_places:
        sites = [[machine] for machine in _around(measured, machines)]
    found = tuple(tuple(rank for machine in site for rank in ranks[machine]) for site in sites)
    if 1 < len(found) < len(nodes):
        return RankLayout(found, are_places)
    order = tuple(rank for site in found for rank in site)
    return RankLayout() if order == tuple(range(len(nodes))) else RankLayout((order,))


def _measured(graph: TopologyGraph, machines: Sequence[str]) -> _Measured | None:
    there = build_graph([facts for facts in graph.nodes if facts.node in machines], graph.links)
    known = [link for link in there.links if link.mbps is not None]
    if len(there.nodes) < len(machines) or len(known) < len(machines) * (len(machines) - 1) // 2:
        return None
    cluster = cluster_from_graph(there, ModelSize(parameters=1), dict.fromkeys(machines, 1.0))
    return _Measured(cluster, LinkMatrix(cluster))


def _around(measured: _Measured | None, machines: Sequence[str]) -> list[str]:
    if measured is None:
        return list(machines)
    numbers = {member.node: number for number, member in enumerate(measured.cluster.members)}
    order = measured.around([numbers[machine] for machine in machines])
    return [measured.cluster.members[one].node for one in order]


def _sites_of_machines(measured: _Measured) -> list[list[str]]:
    """Each with its leader first, whoever has the fastest path to another site, in the order of a ring."""
    cluster, wires = measured
    found = find_sites(cluster, wires)
    if not are_sites_separate(found, wires):
        return [[member.node for member in cluster.members]]

    def outward(site: tuple[int, ...], one: int) -> float:
        return max((wires.both(one, other) for group in found if group != site for other in group), default=0)

    chains = {
        chain[0]: chain for chain in (sorted(site, key=lambda one: -outward(site, one)) for site in found)
    }
    return [[cluster.members[one].node for one in chains[leader]] for leader in measured.around([*chains])]
