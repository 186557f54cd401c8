"""Link matrix of a cluster, and the sites that its links show. Pure.

Only ratios decide what a site is. So a network that is twice as fast everywhere has the same sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy

from barnraise.planning.cost.rings import Costs
from barnraise.planning.inputs.cluster import PlanCluster

_BYTES_PER_MBIT = 1e6 / 8
# Links inside a site and links that leave it differ by at least this factor in rate or latency.
STEP = 4.0
_SHORT_S = 0.002


class LinkMatrix:
    """Rate and latency from each member to each other, by number; 0 and infinity if there is no path."""

    def __init__(self, cluster: PlanCluster) -> None:
        self.names = tuple(member.name for member in cluster.members)
        count = len(self.names)
        numbers = {name: number for number, name in enumerate(self.names)}
        self.rate = [[0.0] * count for _ in range(count)]
        self.latency = [[float("inf")] * count for _ in range(count)]
        ups = [member.up_mbps for member in cluster.members]
        downs = [member.down_mbps for member in cluster.members]
        for path in cluster.paths:
            a, b = numbers[path.source], numbers[path.target]
            limits = (limit for limit in (ups[a], downs[b]) if limit is not None)
            self.rate[a][b] = min([path.mbps, *limits]) * _BYTES_PER_MBIT
            self.latency[a][b] = path.latency_s
        self.out_port = [self._port(ups[member], self.rate[member]) for member in range(count)]
        self.in_port = [
            self._port(downs[member], [row[member] for row in self.rate]) for member in range(count)
        ]
        self._rates = numpy.array(self.rate, dtype=numpy.float64).reshape(count, count)
        self._latencies = numpy.array(self.latency, dtype=numpy.float64).reshape(count, count)

    @staticmethod
    def _port(limit_mbps: float | None, rates: Sequence[float]) -> float:
        return max(rates) if limit_mbps is None else limit_mbps * _BYTES_PER_MBIT

    def hop_costs(self, members: Sequence[int], chunk: float) -> Costs:
        """Return the seconds for ``chunk`` bytes between each pair of members; infinity without a path."""
        chosen = numpy.ix_(members, members)
        with numpy.errstate(divide="ignore"):
            costs: Costs = numpy.divide(chunk, self._rates[chosen]) + self._latencies[chosen]
        return costs

    def slower_rate(self, a: int, b: int) -> float:
        """Return the rate of the slower direction between two members."""
        return min(self.rate[a][b], self.rate[b][a])


def find_sites(cluster: PlanCluster, links: LinkMatrix) -> tuple[tuple[int, ...], ...]:
    """Return the members by site, in order. A machine with a given site name belongs to that site."""
    count = len(links.names)
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    linked = [(a, b) for a, b in pairs if links.slower_rate(a, b) > 0]
    min_rate = _above_step([links.slower_rate(a, b) for a, b in linked])
    max_latency = -_above_step([-_worse_latency(links, a, b) for a, b in linked])
    site = list(range(count))
    for a, b in pairs:
        first, second = cluster.members[a].site, cluster.members[b].site
        if first or second:
            near = first == second
        else:
            near = (
                links.slower_rate(a, b) > 0
                and links.slower_rate(a, b) >= min_rate
                and _worse_latency(links, a, b) <= max_latency
            )
        if near and site[a] != site[b]:
            old, new = site[b], site[a]
            site = [new if name == old else name for name in site]
    sites = (tuple(member for member in range(count) if site[member] == name) for name in dict.fromkeys(site))
    return tuple(sorted(sites))


def are_sites_separate(sites: Sequence[Sequence[int]], links: LinkMatrix) -> bool:
    """Return True if links inside sites are much faster than links between them.

    Then an all-reduce goes through the sites. Latency alone is no reason: a ring uses every port evenly.
    """
    inside = [links.slower_rate(a, b) for site in sites for a, b in combinations(site, 2)]
    between = [
        links.slower_rate(a, b) for first, second in combinations(sites, 2) for a in first for b in second
    ]
    return bool(inside and between) and min(inside) >= STEP * max(between)


def _worse_latency(links: LinkMatrix, a: int, b: int) -> float:
    return max(_SHORT_S, links.latency[a][b], links.latency[b][a])


def _above_step(figures: Sequence[float]) -> float:
    """Return the smallest figure above the largest step; the smallest of all if no step is large enough."""
    known = sorted(set(figures))
    if not known:
        return 0.0
    steps = [(max(after / before, before / after), after) for before, after in pairwise(known)]
    largest = max(steps, default=(1.0, known[0]))
    return largest[1] if largest[0] >= STEP else known[0]
