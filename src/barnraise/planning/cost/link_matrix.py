"""The paths of a cluster as tables to compute with, and which machines are at one site. Pure.

Only ratios decide what a site is, so a network that is twice as fast everywhere has the same sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy

from barnraise.planning.cost.rings import Costs
from barnraise.planning.inputs.cluster import PlanCluster

_BYTES_PER_MBIT = 1e6 / 8
# Between the links of a site and those that leave it, there is at least such a step of rate or latency.
STEP = 4.0
_SHORT_S = 0.002


class LinkMatrix:
    """Rate and latency from each member to each other, by number; without a path 0 and infinite."""

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
            given = (limit for limit in (ups[a], downs[b]) if limit is not None)
            self.rate[a][b] = min([path.mbps, *given]) * _BYTES_PER_MBIT
            self.latency[a][b] = path.latency_s
        self.out_port = [self._port(ups[one], self.rate[one]) for one in range(count)]
        self.in_port = [self._port(downs[one], [row[one] for row in self.rate]) for one in range(count)]
        self._rates = numpy.array(self.rate, dtype=numpy.float64).reshape(count, count)
        self._latencies = numpy.array(self.latency, dtype=numpy.float64).reshape(count, count)

    @staticmethod
    def _port(limit_mbps: float | None, rates: Sequence[float]) -> float:
        return max(rates) if limit_mbps is None else limit_mbps * _BYTES_PER_MBIT

    def hop_costs(self, members: Sequence[int], chunk: float) -> Costs:
        """Seconds for ``chunk`` bytes from each of ``members`` to each other; infinite without a path."""
        chosen = numpy.ix_(members, members)
        with numpy.errstate(divide="ignore"):
            costs: Costs = numpy.divide(chunk, self._rates[chosen]) + self._latencies[chosen]
        return costs

    def both(self, a: int, b: int) -> float:
        """The slower direction."""
        return min(self.rate[a][b], self.rate[b][a])


def find_sites(cluster: PlanCluster, wires: LinkMatrix) -> tuple[tuple[int, ...], ...]:
    """Members by site, in order. Machines with a word for their site are where it says."""
    count = len(wires.names)
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    linked = [(a, b) for a, b in pairs if wires.both(a, b) > 0]
    least = _above_step([wires.both(a, b) for a, b in linked])
    most = -_above_step([-_far(wires, a, b) for a, b in linked])
    site = list(range(count))
    for a, b in pairs:
        first, second = cluster.members[a].site, cluster.members[b].site
        if first or second:
            near = first == second
        else:
            near = wires.both(a, b) > 0 and wires.both(a, b) >= least and _far(wires, a, b) <= most
        if near and site[a] != site[b]:
            old, new = site[b], site[a]
            site = [new if one == old else one for one in site]
    found = (tuple(one for one in range(count) if site[one] == name) for name in dict.fromkeys(site))
    return tuple(sorted(found))


def are_sites_separate(sites: Sequence[Sequence[int]], wires: LinkMatrix) -> bool:
    """Whether all links inside of sites are much faster than those between: then sums go through sites.

    A longer way alone is no reason: then a ring through all of them uses every port evenly.
    """
    inside = [wires.both(a, b) for site in sites for a, b in combinations(site, 2)]
    between = [wires.both(a, b) for one, other in combinations(sites, 2) for a in one for b in other]
    return bool(inside and between) and min(inside) >= STEP * max(between)


def _far(wires: LinkMatrix, a: int, b: int) -> float:
    return max(_SHORT_S, wires.latency[a][b], wires.latency[b][a])


def _above_step(figures: Sequence[float]) -> float:
    """The smallest figure above the largest step, if that is large enough; otherwise the smallest of all."""
    known = sorted(set(figures))
    if not known:
        return 0.0
    steps = [(max(after / before, before / after), after) for before, after in pairwise(known)]
    largest = max(steps, default=(1.0, known[0]))
    return largest[1] if largest[0] >= STEP else known[0]
