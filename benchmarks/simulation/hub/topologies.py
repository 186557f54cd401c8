"""Hubs and their members to simulate: trees with unlike leaves, and the crowd of `benchmarks.hub`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from barnraise.core.flow.retry import ReportedBackoff
from barnraise.hub.client.client import CONNECT_S
from barnraise.hub.protocol.messages import HubDataOrder, RoundConfig
from barnraise.hub.region.region import regional_terms
from barnraise.hub.rounds.leases import ActiveLease, PendingUpdate, round_to_batch
from barnraise.hub.rounds.state_machine import RefuseRequest
from benchmarks.simulation.fake_clock import FakeClock
from benchmarks.simulation.hub.hub import Costs, Reach, Server, SimulatedHub, Sizes, begun_with
from benchmarks.simulation.hub.members import Habits, Leaf, Region
from benchmarks.simulation.hub.queues import Processor

COURSE = HubDataOrder(samples=1 << 40, batch=32, epochs=1 << 9)
TRAINED_S = 60.0  # of a leaf, in a round
_RACK = Reach(1000.0, 1000.0, 0.01)  # a region's way to its parent
_LOOPBACK = Reach(1e6, 1e6, 0.0)
_LATECOMERS_S = 1.0  # in which all leaves begin


class Crowd(NamedTuple):
    """Differences between leaves: log-uniform spreads of speeds and lines, like the homes of `networks`."""

    speeds: tuple[float, float] = (1.0, 10.0)  # samples a second
    up_mbps: tuple[float, float] = (5.0, 50.0)
    down_over_up: float = 5.0
    delay_s: tuple[float, float] = (0.01, 0.05)
    vanish: float = 0.05  # in a round
    away_s: float = 3 * TRAINED_S


class World(NamedTuple):
    clock: FakeClock
    levels: tuple[tuple[SimulatedHub, ...], ...]  # the hub of the run first
    leaves: tuple[Leaf, ...]
    habits: Habits

    @property
    def root(self) -> SimulatedHub:
        return self.levels[0][0]


def tree(
    leaves: int,
    regions: Sequence[int],
    costs: Costs,
    server: Server,
    sizes: Sizes,
    crowd: Crowd,
    seed: int,
    *,
    is_new: bool = False,
) -> World:
    """Create a tree of hubs with its leaves. ``regions``: number of hubs on each level below the first.

    Every leaf has taken part before, unless ``is_new``.
    """
    random.seed(seed)  # the client draws its pauses from it
    source, clock = random.Random(seed), FakeClock()
    shorter = regional_terms(
        RoundConfig(round_s=1.0)
    ).round_s  # with each level, so that a round fits its parent's
    terms = RoundConfig(round_s=TRAINED_S / shorter ** len(regions))
    levels: list[list[SimulatedHub]] = [[SimulatedHub(clock, "hub", terms, COURSE, costs, server, sizes)]]
    for level, count in enumerate(regions):
        above = levels[-1]
        levels.append(
            [
                Region(
                    clock,
                    f"r{level}.{number}",
                    above[number % len(above)],
                    _RACK,
                    COURSE,
                    costs,
                    server,
                    sizes,
                )
                for number in range(count)
            ]
        )
    habits = Habits(source, crowd.vanish, crowd.away_s)
    members = [_leaf(levels[-1][number % len(levels[-1])], number, crowd, habits) for number in range(leaves)]
    for hub in (hub for level in levels for hub in level):
        hub.found()
    if not is_new:
        _begin_with_what_is_usual(levels, members)
    for leaf in members:
        clock.later(source.uniform(0.0, _LATECOMERS_S), leaf.ask)
    for region in (hub for level in levels for hub in level if isinstance(hub, Region)):
        region.begin()
    return World(clock, tuple(tuple(level) for level in levels), tuple(members), habits)


def _leaf(hub: SimulatedHub, number: int, crowd: Crowd, habits: Habits) -> Leaf:
    def drawn(low: float, high: float) -> float:
        return low * math.exp(math.log(high / low) * habits.source.random())

    up = drawn(*crowd.up_mbps)
    reach = Reach(up, crowd.down_over_up * up, habits.source.uniform(*crowd.delay_s))
    return Leaf(hub, f"leaf-{number}", drawn(*crowd.speeds), reach, habits)


def _begin_with_what_is_usual(levels: Sequence[Sequence[SimulatedHub]], leaves: Sequence[Leaf]) -> None:
    usual: dict[str, dict[str, int]] = {hub.name: {} for level in levels for hub in level}
    for leaf in leaves:
        usual[leaf.hub.name][leaf.name] = round_to_batch(COURSE, leaf.speed * leaf.hub.terms.round_s)
    for level in reversed(levels):
        for hub in level:
            begun_with(hub, usual[hub.name])
            if isinstance(hub, Region):
                usual[hub.parent.name][hub.name] = sum(usual[hub.name].values())


class Load(NamedTuple):
    """Load of one hub in the observed time, each as a share of its capacity."""

    loop: float
    cores: float
    line_in: float
    line_out: float
    places: float

    def fullest(self) -> tuple[str, float]:
        named = {
            "the event loop": self.loop,
            "the cores": self.cores,
            "the line in": self.line_in,
            "the line out": self.line_out,
            "places for bodies": self.places,
        }
        return max(named.items(), key=lambda item: item[1])


class Figures(NamedTuple):
    seconds: float
    rounds: int
    utilisation: float  # samples that counted, of those that all leaves could have trained on
    leaf_bytes: float  # for each update that was counted
    counted: int
    late: int
    refused: dict[str, int]
    came_to_nothing: int
    vanished: int
    loads: tuple[Load, ...]  # of the busiest hub of each level
    hub_in_mb: tuple[float, ...]  # in a round, the same
    hub_out_mb: tuple[float, ...]
    hub_cpu_s: tuple[float, ...]  # in a round, the same
    cores_busy: float  # of all hubs together
    mbps_busy: float  # of their fuller directions
    fan_in: tuple[int, ...]
    doubled: int  # samples


class _Marks(NamedTuple):
    at: float
    version: int
    samples: int
    leaf_bytes: float
    counted: int
    late: int
    nothing: int
    vanished: int
    refused: dict[str, int]
    hubs: tuple[tuple[float, float, float, float, float], ...]


def look(world: World, rounds: int, first: int = 1, longest_s: float = 36_000.0) -> Figures:
    """Run from version ``first`` on for ``rounds`` versions, and return the figures of that time."""
    clock, root = world.clock, world.root
    clock.run_until(lambda: root.version >= first or clock.now > longest_s)
    before = _marks(world)
    clock.run_until(lambda: root.version >= first + rounds or clock.now > longest_s)
    return _figures(world, before, _marks(world))


def _marks(world: World) -> _Marks:
    hubs = [hub for level in world.levels for hub in level]
    words = world.root.sizes.words
    refused: dict[str, int] = {}
    for hub in hubs:
        for kind, count in hub.tally.refused.items():
            refused[kind] = refused.get(kind, 0) + count
    lowest = world.levels[-1]
    return _Marks(
        at=world.clock.now,
        version=world.root.version,
        samples=world.root.tally.samples,
        leaf_bytes=sum(leaf.sent + leaf.received + leaf.questions * words for leaf in world.leaves),
        counted=sum(hub.tally.counted for hub in lowest),
        late=sum(hub.tally.late for hub in lowest),
        nothing=sum(hub.came_to_nothing for hub in hubs if isinstance(hub, Region)),
        vanished=world.habits.vanished,
        refused=refused,
        hubs=tuple(
            (hub.cpu.loop_s, hub.cpu.busy_s, hub.into.carried, hub.out.carried, hub.places.busy_s())
            for hub in hubs
        ),
    )


def _figures(world: World, before: _Marks, after: _Marks) -> Figures:
    seconds, rounds = after.at - before.at, max(1, after.version - before.version)
    speed = sum(leaf.speed for leaf in world.leaves)
    spent = [
        tuple(late - early for early, late in zip(*pair, strict=True))
        for pair in zip(before.hubs, after.hubs, strict=True)
    ]
    rate = world.root.server.mbps * 1e6 / 8
    cores = world.root.server.cores
    loads, into, out, cpu, place = [], [], [], [], 0
    for level in world.levels:
        level_usage = spent[place : place + len(level)]
        place += len(level)
        busiest = max(level_usage, key=lambda usage: usage[1])
        loop, busy, taken, given, held = (amount / seconds for amount in busiest)
        loads.append(Load(loop, busy / cores, taken / rate, given / rate, held))
        into.append(busiest[2] / rounds / 1e6)
        out.append(busiest[3] / rounds / 1e6)
        cpu.append(busiest[1] / rounds)
    members = [len({*hub.state.usual}) for level in world.levels for hub in level]
    starts = [sum(len(level) for level in world.levels[:depth]) for depth in range(len(world.levels) + 1)]
    return Figures(
        seconds=seconds,
        rounds=after.version - before.version,
        utilisation=(after.samples - before.samples) / (speed * seconds),
        leaf_bytes=(after.leaf_bytes - before.leaf_bytes) / max(1, after.counted - before.counted),
        counted=after.counted - before.counted,
        late=after.late - before.late,
        refused={kind: n - before.refused.get(kind, 0) for kind, n in after.refused.items()},
        came_to_nothing=after.nothing - before.nothing,
        vanished=after.vanished - before.vanished,
        loads=tuple(loads),
        hub_in_mb=tuple(into),
        hub_out_mb=tuple(out),
        hub_cpu_s=tuple(cpu),
        cores_busy=sum(usage[1] for usage in spent) / seconds,
        mbps_busy=sum(max(usage[2], usage[3]) for usage in spent) / seconds * 8e-6,
        fan_in=tuple(max(members[a:b]) for a, b in pairwise(starts)),
        doubled=doubled(world.root),
    )


def doubled(hub: SimulatedHub) -> int:
    """Count the samples that appear twice in the chain."""
    spans = sorted(span for part in hub.parts for span in part.spans)
    return sum(
        max(0, earlier.last - later.first)
        for earlier, later in pairwise(spans)
        if earlier.epoch == later.epoch
    )


def warm_up(leaves: int, regions: Sequence[int], costs: Costs, sizes: Sizes, rounds: int = 12) -> int:
    """Return the round of a new run that first has nine tenths of the samples of the fullest round."""
    world = tree(leaves, regions, costs, Server(), sizes, Crowd(vanish=0.0), 1, is_new=True)
    look(world, rounds)
    samples = [closed.samples for closed in world.root.tally.rounds]
    return next(place for place, count in enumerate(samples, 1) if count >= 0.9 * max(samples))


# The crowd that is measured.


class CrowdCosts(NamedTuple):
    """Seconds of the crowd's own process for each member."""

    ask_s: float
    push_s: float
    pull_s: float


class Member:
    """As `hub_crowd.Leaf`, which trains nothing."""

    def __init__(self, hub: SimulatedHub, name: str, crowd: Processor, costs: CrowdCosts) -> None:
        self.hub, self.name, self._crowd, self._costs = hub, name, crowd, costs
        self._lease: ActiveLease | None = None
        self.version = 0

    def ask(self, done: Callable[[], None]) -> None:
        send_request = partial(self.hub.ask, self.name, self.version, 2.0, 0.0, partial(self._answered, done))
        self._crowd.loop(self._costs.ask_s, send_request)

    def _answered(self, done: Callable[[], None], reply: ActiveLease | RefuseRequest) -> None:
        if isinstance(reply, ActiveLease):
            self._lease = reply
            done()
        else:
            self.hub.clock.later(random.uniform(0.5, 1.5), partial(self.ask, done))

    def push(self, done: Callable[[], None]) -> None:
        lease = self._lease
        assert lease is not None
        update = PendingUpdate(f"{lease.id}-{self.name}", self.name, lease.id, lease.version, lease.samples)
        self._crowd.loop(self._costs.push_s, partial(self.hub.push, update, _LOOPBACK, lambda _: done()))

    def pull(self, done: Callable[[], None]) -> None:
        self.hub.head(self.version, 25.0, partial(self._headed, done))

    def _headed(self, done: Callable[[], None], version: int | None) -> None:
        if version is None:
            self.pull(done)
            return
        self.version = version
        read = partial(self._crowd.loop, self._costs.pull_s, done)
        self.hub.fetch(1, _LOOPBACK, read)


def crowd_round_s(
    members: int, regions: int, rounds: int, costs: Costs, crowd: CrowdCosts, sizes: Sizes, cores: int
) -> list[float]:
    """Simulate the measurement of `benchmarks.hub`: all lease, all push at once, all pull.

    Return the seconds of each round. The crowd and the hubs share the cores of one machine.
    """
    random.seed(1)
    clock, shared = FakeClock(), [0.0] * cores
    terms = RoundConfig(round_s=600.0, first_batches=4 * members if regions else 4)
    server = Server(cores=cores, mbps=1e6)
    root = SimulatedHub(clock, "hub", terms, COURSE, costs, server, sizes)
    hubs: list[SimulatedHub] = [
        Region(clock, f"region {number}", root, _LOOPBACK, COURSE, costs, server, sizes)
        for number in range(regions)
    ] or [root]
    for hub in dict.fromkeys((root, *hubs)):
        hub.cpu = Processor(clock, shared)
        hub.found()
    for hub in hubs:
        if isinstance(hub, Region):
            hub.begin()
    process = Processor(clock, shared)
    crowd_members = [
        Member(hubs[number % len(hubs)], f"leaf {number}", process, crowd) for number in range(members)
    ]
    durations = []
    for _ in range(rounds):
        begin = clock.now
        for phase in (Member.ask, Member.push, Member.pull):
            _all_do(phase, crowd_members, clock)
        durations.append(clock.now - begin)
    return durations


def _all_do(
    phase: Callable[[Member, Callable[[], None]], None], members: Sequence[Member], clock: FakeClock
) -> None:
    """Run a phase on all members until the last is done."""
    left = [len(members)]

    def done() -> None:
        left[0] -= 1

    for member in members:
        phase(member, done)
    clock.run_until(lambda: not left[0])


# All members reconnect after an outage.


def herd(members: int, handshake_s: float, away_s: float, seed: int = 1) -> tuple[float, float]:
    """Simulate the return of a hub after ``away_s``, when all its members connect again at once.

    Return the seconds until all are connected, and the handshakes that this took per member. A member that
    waits longer than the client's timeout disconnects and retries after the client's backoff. The hub's work
    for that handshake is lost.
    """
    random.seed(seed)
    clock = FakeClock()
    cpu = Processor(clock, [0.0])
    left, tried = [members], [0]

    def come(waiting: ReportedBackoff) -> None:
        if clock.now < away_s:
            waiting.pause("the hub is away")
        else:
            tried[0] += 1
            cpu.loop(handshake_s, partial(served, waiting, clock.now))

    def served(waiting: ReportedBackoff, began: float) -> None:
        if clock.now - began <= CONNECT_S:
            left[0] -= 1
        else:
            waiting.pause("the hub did not answer in time")

    for _ in range(members):
        later: list[ReportedBackoff] = []

        def sleep(seconds: float, later: list[ReportedBackoff] = later) -> None:
            clock.later(seconds, lambda: come(later[0]))

        later.append(ReportedBackoff("the hub", lambda words: None, sleep, lambda: clock.now))
        clock.later(random.uniform(0.0, 0.1), partial(come, later[0]))
    clock.run_until(lambda: not left[0])
    return clock.now - away_s, tried[0] / members
