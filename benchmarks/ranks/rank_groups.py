"""Ranks that hold the same groups of several engines, and the fleets they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ranks.hosts import Fleet, Host, Rank, ThisMachine, ask_all, identities, working_directory
from lab import Lab, why_unavailable

CONTROL = "gloo"
STRATEGY = "BARNRAISE_COLLECTIVES_STRATEGY"


@dataclass(frozen=True)
class Contender:
    """One side of a comparison: a name, a backend, and settings in force when its group is made."""

    name: str
    backend: str
    settings: Mapping[str, str]


def contenders(engines: Sequence[str]) -> list[Contender]:
    """Return one contender per engine; the names differ even when the engines do not."""
    return [Contender(f"{index}:{engine}", engine, {}) for index, engine in enumerate(engines)]


@dataclass(frozen=True)
class RankSet:
    """The ranks of one group size; each holds one group per contender, and a Gloo group to line up."""

    fleet: Fleet
    all_ranks: Sequence[Rank]
    store: Rank
    size: int
    contenders: Sequence[Contender]

    @property
    def names(self) -> list[str]:
        return [f"{contender.name}/{self.size}" for contender in self.contenders]

    @property
    def ranks(self) -> Sequence[Rank]:
        return self.all_ranks[: self.size]

    @classmethod
    def gather(
        cls,
        fleet: Fleet,
        places: Sequence[int],
        contenders: Sequence[Contender],
        sizes: Sequence[int],
        environment: Mapping[str, str] | None = None,
    ) -> RankSet:
        """Start one rank per place (a host may appear twice), with groups of the first 2, 3, ... ranks."""
        store = fleet.fork(places[0], "store")
        address = fleet.hosts[places[0]].address
        port = store.ask("serve_store", address=address)
        ranks = [fleet.fork(place, f"rank{index}", environment) for index, place in enumerate(places)]
        ask_all(ranks, "connect_store", address=address, port=port)
        for index, rank in enumerate(ranks):
            rank.tell("join", backend="gloo", prefix="control", rank=index, world=len(ranks))
        for rank in ranks:
            rank.answer()
        rank_set = cls(fleet, ranks, store, len(ranks), contenders)
        for size in sizes:
            rank_set.part(size).make_groups()
        return rank_set

    def part(self, size: int) -> RankSet:
        return RankSet(self.fleet, self.all_ranks, self.store, size, self.contenders)

    def make_groups(self) -> dict[str, float]:
        """Create the groups of this size; return the seconds that each took on the slowest rank."""
        members = list(range(self.size))
        took = {}
        control = Contender(CONTROL, "gloo", {})
        for contender, name in [(control, self.control), *zip(self.contenders, self.names, strict=True)]:
            settings = dict(contender.settings)
            done = ask_all(
                self.all_ranks,
                "group",
                name=name,
                backend=contender.backend,
                members=members,
                settings=settings,
            )
            took[name] = max(done)
        return took

    @property
    def control(self) -> str:
        return f"{CONTROL}/{self.size}"

    def ask(self, do: str, *, timeout: float = 300.0, **arguments: Any) -> list[Any]:
        """Run the same measurement on every member, for all contenders in turns."""
        return self.ask_some(self.names, do, timeout=timeout, **arguments)

    def ask_some(
        self, names: Sequence[str], do: str, *, timeout: float = 300.0, **arguments: Any
    ) -> list[Any]:
        """Run the same measurement on every member, for some of the contenders."""
        control = self.control
        return ask_all(self.ranks, do, timeout=timeout, names=list(names), control=control, **arguments)

    def end(self) -> None:
        for rank in [*self.all_ranks, self.store]:
            self.fleet.retire(rank)


@contextmanager
def lab_fleet(
    hosts: int,
    rate: str | None,
    delay: str = "0ms",
    settings: Mapping[str, str] | None = None,
    ours: bool = True,
) -> Iterator[tuple[Lab, Fleet]]:
    """Start hosts in namespaces, each with a key of its own and a fork server."""
    if (why := why_unavailable()) is not None:
        raise SystemExit(f"no lab here: {why}")
    with Lab(hosts=hosts, rate=rate, delay=delay) as lab, fleet_on(lab.hosts, settings, ours) as fleet:
        yield lab, fleet


@contextmanager
def fleet_on(
    hosts: Sequence[Host], settings: Mapping[str, str] | None = None, ours: bool = True
) -> Iterator[Fleet]:
    with working_directory() as directory:
        addresses = [host.address for host in hosts]
        machines = identities(directory, addresses) if ours else [{} for _ in hosts]
        environments = [machine | dict(settings or {}) for machine in machines]
        with Fleet(hosts, directory, environments) as fleet:
            yield fleet


class Inside:
    """A lab host used by itself: what runs there meets over its loopback, which nothing shapes."""

    def __init__(self, host: Host) -> None:
        self.address = "127.0.0.1"
        self._host = host

    def start(self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> object:
        return self._host.start(argv, env)


@contextmanager
def loopback_rank_set(engines: Sequence[str], encryption: str) -> Iterator[RankSet]:
    """Start two ranks on a host of their own, to keep away from the user's listener; without a lab, here."""
    settings = {"BARNRAISE_NETWORK_ENCRYPTION": encryption}
    with ExitStack() as stack:
        host: Host = ThisMachine()
        if why_unavailable() is None:
            host = Inside(stack.enter_context(Lab(hosts=1, rate=None)).hosts[0])
        fleet = stack.enter_context(fleet_on([host], settings, ours="barnraise" in engines))
        yield RankSet.gather(fleet, [0, 0], contenders(engines), sizes=(2,))
