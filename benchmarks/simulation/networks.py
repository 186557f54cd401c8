"""Networks to simulate: the lab's, where hosts are alike, and homes whose machines share one line."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.planning import NetworkPath, PlanCluster, PlannedMachine, build_cluster
from benchmarks.simulation.all_reduce import Links
from benchmarks.simulation.fake_clock import FakeClock
from benchmarks.simulation.network import Link, Network, Way
from benchmarks.simulation.training import Training

# Of a rate in frames on the wire, what TCP carries of it (docs/lab.md), and of that what TLS leaves.
PAYLOAD = 0.956 * 0.998
# With 20 ms on the way, one connection reached less of the line (docs/benchmarks/strategies.json).
FAR, FAR_SHARE = 0.005, 0.85
SOFTWARE_S = 150e-6  # of a message, besides its way
_MBIT = 1e6 / 8
_LARGE_BUCKET = 128 << 20


class World(NamedTuple):
    """Machines, what they could compute, and what lies between them.

    ``cluster``: as the planner sees it, each site being one machine where there are sites.
    """

    clock: FakeClock
    network: Network
    links: Links
    speeds: Mapping[int, float]
    cluster: PlanCluster
    wires: tuple[Link, ...]  # that may be what limits, by name


class Lines(NamedTuple):
    """Network of a home: the log-uniform spread of its line, and the rate between its machines."""

    up_mbps: tuple[float, float] = (20.0, 500.0)
    down_over_up: float = 5.0
    delay_s: tuple[float, float] = (0.003, 0.020)  # to the middle of the internet
    lan_mbps: float = 900.0
    lan_delay_s: float = 0.0002


def lab_world(hosts: int, mbps: float, delay_ms: float, speed: float) -> World:
    """Create hosts on one switch, each with a line of its own."""
    clock = FakeClock()
    rate, delay = mbps * PAYLOAD, delay_ms / 1e3 + SOFTWARE_S
    rate *= FAR_SHARE if delay > FAR else 1.0
    ups = [Link(f"from h{host}", rate) for host in range(hosts)]
    downs = [Link(f"to h{host}", rate) for host in range(hosts)]
    network = Network(clock, lambda a, b: Way((ups[a], downs[b]), delay))
    names = [f"h{host}" for host in range(hosts)]
    cluster = build_cluster(
        (PlannedMachine(name=name, samples_per_s=speed) for name in names),
        (NetworkPath(source=a, target=b, mbps=rate, latency_s=delay) for a in names for b in names if a != b),
    )
    table = CostTable.measured(delay, 1 / (rate * _MBIT))
    speeds = dict.fromkeys(range(hosts), speed)
    return World(clock, network, Links(table), speeds, cluster, (*ups, *downs))


def homes(
    sites: int, machines: int, seed: int, speed: float = 1.0, spread: float = 0.4, lines: Lines | None = None
) -> World:
    """Create homes with several machines each; ``spread``: of the logarithm of speeds around their median."""
    given, rng, clock = lines or Lines(), random.Random(seed), FakeClock()
    low, high = given.up_mbps
    rates = [FAR_SHARE * PAYLOAD * low * (high / low) ** rng.random() for _ in range(sites)]
    delays = [rng.uniform(*given.delay_s) for _ in range(sites)]
    count = sites * machines
    ups = [Link(f"up of site {site}", rate) for site, rate in enumerate(rates)]
    downs = [Link(f"down of site {site}", given.down_over_up * rate) for site, rate in enumerate(rates)]
    out = [Link(f"from machine {machine}", given.lan_mbps) for machine in range(count)]
    into = [Link(f"to machine {machine}", given.lan_mbps) for machine in range(count)]

    def way(a: int, b: int) -> Way:
        here, there = a // machines, b // machines
        if here == there:
            return Way((out[a], into[b]), given.lan_delay_s + SOFTWARE_S)
        return Way((out[a], ups[here], downs[there], into[b]), delays[here] + delays[there] + SOFTWARE_S)

    speeds = {machine: speed * rng.lognormvariate(0.0, spread) for machine in range(count)}
    groups = tuple(tuple(range(site * machines, (site + 1) * machines)) for site in range(sites))
    table = CostTable.measured(2 * max(delays), 1 / (min(rates) * _MBIT))
    cluster = build_cluster(
        (
            PlannedMachine(
                name=f"site {site:02}",
                samples_per_s=sum(speeds[machine] for machine in group),
                up_mbps=rates[site],
                down_mbps=given.down_over_up * rates[site],
            )
            for site, group in enumerate(groups)
        ),
        (
            NetworkPath(
                source=f"site {a:02}",
                target=f"site {b:02}",
                mbps=min(rates[a], given.down_over_up * rates[b]),
                latency_s=delays[a] + delays[b],
            )
            for a in range(sites)
            for b in range(sites)
            if a != b
        ),
    )
    links = Links(table, groups, _LARGE_BUCKET)
    return World(clock, Network(clock, way), links, speeds, cluster, (*ups, *downs))


class Churn:
    """Machines that die and return, each after a time of its own; the state comes from a neighbour."""

    def __init__(
        self, world: World, training: Training, seed: int, life_s: float, away_s: float, state_bytes: float
    ) -> None:
        self.deaths = self.returns = 0
        self._world, self._training = world, training
        self._rng = random.Random(seed)
        self._life_s, self._away_s, self._state_bytes = life_s, away_s, state_bytes
        for machine in world.speeds:
            self._await_death(machine)

    def _await_death(self, machine: int) -> None:
        self._world.clock.later(self._rng.expovariate(1 / self._life_s), partial(self._die, machine))

    def _die(self, machine: int) -> None:
        self.deaths += 1
        self._training.die(machine)
        self._world.clock.later(self._rng.expovariate(1 / self._away_s), partial(self._heal, machine))

    def _heal(self, machine: int) -> None:
        site = next((site for site in self._world.links.sites if machine in site), ())
        members = self._training.members
        near = [other for other in site if other in members and other != machine] or members
        donor = self._rng.choice(near)
        owner = ("heal", machine, self.deaths)
        self._world.network.send(owner, donor, machine, self._state_bytes, partial(self._come, machine))

    def _come(self, machine: int) -> None:
        self.returns += 1
        self._training.come(machine)
        self._await_death(machine)
