"""Which ranks of a group are at one place, for a sum that crosses between places only once. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from backyard.planning.cluster import cluster_of
from backyard.planning.inputs import Model
from backyard.planning.wires import Wires, are_apart, sites_of
from backyard.topology.graph import Graph, build_graph

Sites = tuple[tuple[int, ...], ...]


def ranks_by_site(graph: Graph, nodes: Sequence[str]) -> Sites:
    """The ranks of each site, the leader first; empty where there is nothing to tell apart.

    ``nodes``: the machine of each rank. Machines of one site, by the measured links; if all are at one, the
    ranks of one machine.
    """
    machines = list(dict.fromkeys(nodes))
    ranks = {machine: [rank for rank, node in enumerate(nodes) if node == machine] for machine in machines}
    sites = _sites_of_machines(graph, machines)
    if len(sites) < 2:
        sites = [[machine] for machine in machines]
    if len(sites) < 2 or len(sites) == len(nodes):
        return ()
    return tuple(tuple(rank for machine in site for rank in ranks[machine]) for site in sites)


def _sites_of_machines(graph: Graph, machines: Sequence[str]) -> list[list[str]]:
    """Each with its leader first: whoever has the fastest path to another site. One, if links are missing."""
    there = build_graph([facts for facts in graph.nodes if facts.node in machines], graph.links)
    measured = [link for link in there.links if link.mbps is not None]
    if len(there.nodes) < len(machines) or len(measured) < len(machines) * (len(machines) - 1) // 2:
        return [list(machines)]
    cluster = cluster_of(there, Model(parameters=1), dict.fromkeys(machines, 1.0))
    wires = Wires(cluster)
    found = sites_of(cluster, wires)
    if not are_apart(found, wires):
        return [list(machines)]

    def outward(site: tuple[int, ...], one: int) -> float:
        return max((wires.both(one, other) for group in found if group != site for other in group), default=0)

    chains = (sorted(site, key=lambda one: -outward(site, one)) for site in found)
    return [[cluster.members[one].node for one in chain] for chain in chains]
