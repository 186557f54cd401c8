"""Hubs with up to a hundred thousand leaves: real decisions on a fake clock, at costs that are measured
first.

    python -m benchmarks.simulation.hub --quick     20,000 leaves at most
    python -m benchmarks.simulation.hub             more rounds, more trees, a hundred thousand
    python -m benchmarks.simulation.hub --leaves 100000 --regions 32 1000

First a small real crowd measures the cost of a hub's work, and the simulator is checked against other crowds.
Then hubs are simulated, flat and as trees of two and three levels. The speeds and lines of the leaves differ
by a factor of ten, and some leaves vanish in every round. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from barnraise.hub.protocol.messages import RoundConfig
from barnraise.hub.rounds.leases import PendingUpdate
from barnraise.hub.rounds.state_machine import (
    GrantLease,
    LeaseRequested,
    RoundCommitted,
    RoundState,
    RunFounded,
    UpdateAccepted,
    UploadProgressed,
    decide,
)
from barnraise.hub.server.connection_limits import MOST as CONNECTIONS
from benchmarks.hub.costs import SMALL, Logged, Played, costs_of, logged, merge_mb_s, play, sync_s, trim_mb
from benchmarks.ranks.hosts import prepare_driver
from benchmarks.report import environment_line, last_line, table
from benchmarks.simulation.hub.hub import Costs, Server, Sizes
from benchmarks.simulation.hub.topologies import (
    COURSE,
    Crowd,
    CrowdCosts,
    Figures,
    crowd_round_s,
    herd,
    look,
    tree,
    warm_up,
)

SERVER = Server()
_FULL = 0.7  # of a server that may be used
# Of a connection: at rest, and with what a slow reader has not taken yet (docs/benchmarks/hub.md).
_CONNECTION_MB = 0.39
_MONTH_S = 30 * 86_400.0


class Shape(NamedTuple):
    leaves: int
    regions: tuple[int, ...] = ()  # hubs of each level below the first

    @property
    def name(self) -> str:
        return " x ".join(["1", *map(str, self.regions)])


QUICK = (Shape(100), Shape(1000), Shape(4000), Shape(10_000, (100,)), Shape(20_000, (14, 200)))
FULL = (
    *QUICK[:3],
    Shape(8000),
    Shape(1000, (10,)),
    *QUICK[3:4],
    Shape(10_000, (32,)),
    Shape(100_000, (100,)),
    Shape(100_000, (316,)),
    *QUICK[4:],
    Shape(100_000, (32, 1000)),
)
_NEW = (Shape(100), Shape(1000, (10,)), Shape(1000, (3, 30)))


class Measured(NamedTuple):
    costs: Costs
    crowd: CrowdCosts
    sizes: Sizes
    played: Played  # the crowd that this was taken from
    trim_mb: float
    log: Logged


def measure(rounds: int) -> Measured:
    large, small = play(40, 0, rounds), play(40, 0, rounds, SMALL)
    costs, crowd, sizes = costs_of(large, small, merge_mb_s(), sync_s())
    print("\nMeasured, for each of 40 members in a round (milliseconds of a core):")
    rows = [
        [f"{phase}, {played.megabytes:g} MB", *(1e3 * value for value in played.spent[phase])]
        for played in (large, small)
        for phase in played.spent
    ]
    print(table(["", "event loop", "threads", "the crowd"], rows), flush=True)
    spent = {name: round(1e3 * value, 3) for name, value in costs._asdict().items()}
    print(f"so it is simulated with (ms): {spent}", flush=True)
    measured = Measured(costs, crowd, sizes, large, trim_mb(), logged())
    print(
        f"a leaf's round is {large.leaf_bytes / 1e6:.3f} MB; the hub's peak is {large.peak_mb:.0f} MB; "
        f"a trimmed mean takes {measured.trim_mb:.2f} MB for each update and core; the log grows by "
        f"{measured.log.update_bytes:.0f} bytes for each update",
        flush=True,
    )
    return measured


def check(measured: Measured, rounds: int) -> dict[str, float]:
    """Return the relative error of each simulated round time against a real crowd.

    The costs come from the first crowd, but not from the time of its round.
    """
    errors, rows = {}, []
    cores = os.cpu_count() or 1
    for real in (measured.played, play(15, 0, rounds), play(80, 0, rounds), play(40, 2, rounds)):
        members, regions = real.members, real.regions
        speed = max(0.1, 1 - real.others / cores)  # what others use, the crowd and its hubs do not have
        costs = Costs(*(cost / speed for cost in measured.costs))
        crowd = CrowdCosts(*(cost / speed for cost in measured.crowd))
        simulated_s = statistics.median(
            crowd_round_s(members, regions, rounds, costs, crowd, measured.sizes, cores)
        )
        name = f"{members} in {regions} regions" if regions else f"{members} flat"
        errors[name] = simulated_s / real.round_s - 1
        rows.append([name, real.round_s, simulated_s, f"{100 * errors[name]:+.0f} %", real.others])
    print("\nA round of all members without training (seconds):")
    print(table(["members", "measured", "simulated", "off", "cores that others used"], rows), flush=True)
    return errors


def simulate(shapes: Sequence[Shape], measured: Measured, rounds: int) -> dict[str, Any]:
    summaries: dict[str, Any] = {}
    rows = []
    gc.disable()  # there is nothing to find among millions of objects
    for shape in shapes:
        begin = time.monotonic()
        world = tree(
            shape.leaves, shape.regions, measured.costs, SERVER, measured.sizes, Crowd(), seed=shape.leaves
        )
        figures = look(world, rounds if shape.leaves < 100_000 else 1)  # a minute of a core for each
        summary = _summary(shape, figures, measured)
        summaries[f"{shape.leaves} in {shape.name}"] = summary | {"simulated_in_s": time.monotonic() - begin}
        rows.append(_row(shape, figures, summary))
        print(f"{time.strftime('%X')} {shape.leaves} leaves, hubs {shape.name}: {summary}", flush=True)
    print("\nSimulated: leaves train 60 s of a round, speeds and lines 10 times apart, 5 % vanish in each:")
    print(table(_HEAD, rows), flush=True)
    return summaries


_HEAD = [
    "leaves, hubs by level",
    "fan-in",
    "rounds/min",
    "used",
    "MB of a leaf",
    "MB in, out of a hub",
    "CPU s",
    "hub MB",
    "limits",
    "busy",
    "late",
    "lost",
    "servers",
]


def _row(shape: Shape, figures: Figures, summary: dict[str, Any]) -> list[Any]:
    worst = max(range(len(figures.loads)), key=lambda level: figures.hub_in_mb[level])
    return [
        f"{shape.leaves}, {shape.name}",
        "/".join(map(str, figures.fan_in)),
        summary["rounds_per_min"],
        f"{100 * figures.utilisation:.0f} %",
        summary["leaf_mb"],
        f"{figures.hub_in_mb[worst]:.0f}, {figures.hub_out_mb[worst]:.0f}",
        figures.hub_cpu_s[worst],
        f"{summary['hub_mb']:.0f} ({summary['hub_mb_trimmed']:.0f})",
        summary["limits"],
        f"{100 * summary['busy']:.0f} %",
        f"{100 * summary['late']:.1f} %",
        f"{100 * summary['lost']:.1f} %",
        summary["servers"],
    ]


def _summary(shape: Shape, figures: Figures, measured: Measured) -> dict[str, Any]:
    limits, busy = max((load.fullest() for load in figures.loads), key=lambda load: load[1])
    tried = figures.counted + sum(figures.refused.values())
    fan_in = max(figures.fan_in)
    hub_mb = measured.played.peak_mb + _CONNECTION_MB * max(0, fan_in - measured.played.members)
    hubs = 1 + sum(shape.regions)
    return {
        "nodes": shape.leaves,
        "levels": 1 + len(shape.regions),
        "hubs": hubs,
        "fan_in": figures.fan_in,
        "rounds_per_min": 60 * figures.rounds / figures.seconds,
        "round_s": figures.seconds / max(1, figures.rounds),
        "utilisation": figures.utilisation,
        "leaf_mb": figures.leaf_bytes / 1e6,
        "hub_in_mb": figures.hub_in_mb,
        "hub_out_mb": figures.hub_out_mb,
        "hub_cpu_s": figures.hub_cpu_s,
        "hub_mb": hub_mb,
        "hub_mb_trimmed": hub_mb + measured.trim_mb * fan_in * SERVER.cores,
        "limits": limits,
        "busy": busy,
        "late": figures.late / max(1, tried),
        "lost": (sum(figures.refused.values()) + figures.came_to_nothing) / max(1, tried),
        "refused": figures.refused,
        "came_to_nothing": figures.came_to_nothing,
        "vanished": figures.vanished,
        "samples_counted_twice": figures.doubled,
        "servers": servers(figures, hubs, hub_mb),
        "log_gb_per_day": measured.log.update_bytes
        * fan_in
        * 86_400
        * figures.rounds
        / figures.seconds
        / 1e9,
    }


def servers(figures: Figures, hubs: int, hub_mb: float) -> int:
    """Return the number of small servers that all hubs need, by cores, memory, lines and monthly bytes."""
    needed = (
        figures.cores_busy / SERVER.cores / _FULL,
        hubs * hub_mb / 1e3 / SERVER.gigabytes / _FULL,
        figures.mbps_busy / SERVER.mbps / _FULL,
        figures.mbps_busy / 8e6 * _MONTH_S / SERVER.month_terabytes,
    )
    return max(1, math.ceil(max(needed)))


def decisions(members: int) -> float:
    """Measure microseconds of a hub's own decisions per member and round: constant unless something is
    quadratic.
    """
    state = decide(RoundState(terms=RoundConfig(round_s=60.0)), RunFounded(COURSE), 0.0).state
    begin = time.process_time()
    leases = []
    for number in range(members):
        decision = decide(state, LeaseRequested(f"leaf-{number}", f"{number:032x}", 0, 2.0), 0.0)
        state = decision.state
        leases += [effect.lease for effect in decision.effects if isinstance(effect, GrantLease)]
    for lease in leases:
        state = decide(state, UploadProgressed(lease.id), 60.0).state
    for lease in leases:
        update = PendingUpdate(f"u{lease.id}", lease.node, lease.id, 0, lease.samples)
        state = decide(state, UpdateAccepted(update), 61.0).state
    assert len(state.closing) == members
    state = decide(state, RoundCommitted(1), 62.0).state
    return 1e6 * (time.process_time() - begin) / members


def scale(measured: Measured, max_members: int) -> dict[str, Any]:
    """Measure single parts of a hub with many members."""
    costs = {members: decisions(members) for members in (1000, 10_000, max_members)}
    listing = ", ".join(f"{cost:.0f} of {members}" for members, cost in costs.items())
    print(f"\nDecisions of a round, microseconds for each member: {listing}")
    reconnections = {
        members: herd(members, measured.costs.handshake_s, 10.0) for members in (100, 1000, CONNECTIONS)
    }
    warm = {
        shape.name: warm_up(shape.leaves, shape.regions, measured.costs, measured.sizes) for shape in _NEW
    }
    listing = ", ".join(f"{rounds} with hubs {name}" for name, rounds in warm.items())
    print(f"rounds until a new run is in full swing: {listing}")
    for members, (seconds, tries) in reconnections.items():
        print(
            f"a hub that was away for 10 s has its {members} members again after {seconds:.1f} s, "
            f"{tries:.2f} handshakes each",
            flush=True,
        )
    return {
        "decision_us": {str(members): cost for members, cost in costs.items()},
        "warm_up_rounds": warm,
        "herd_s": {str(members): reconnection[0] for members, reconnection in reconnections.items()},
        "herd_handshakes": {str(members): reconnection[1] for members, reconnection in reconnections.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--leaves", type=int, help="only this many, with --regions")
    parser.add_argument(
        "--regions", type=int, nargs="*", default=[], help="hubs of each level below the first"
    )
    options = parser.parse_args()
    prepare_driver()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    print(environment_line(), flush=True)
    begin = time.monotonic()
    measured = measure(3 if options.quick else 6)
    errors = check(measured, 3 if options.quick else 6)
    shapes: Sequence[Shape] = QUICK if options.quick else FULL
    if options.leaves:
        shapes = (Shape(options.leaves, tuple(options.regions)),)
    summaries = simulate(shapes, measured, 2 if options.quick else 3)
    parts = scale(measured, 20_000 if options.quick else 100_000)
    last_line(
        {
            "nodes": max(shape.leaves for shape in shapes),
            "simulated_off": errors,
            "simulated_off_worst": max(map(abs, errors.values())),
            "leaf_mb_most_over_least": max(summary["leaf_mb"] for summary in summaries.values())
            / min(summary["leaf_mb"] for summary in summaries.values()),
            **parts,
            "trees": summaries,
            "costs_ms": {name: 1e3 * value for name, value in measured.costs._asdict().items()},
            "trim_mb": measured.trim_mb,
            "log_update_bytes": measured.log.update_bytes,
            "seconds": time.monotonic() - begin,
        }
    )
    return 1 if any(summary["samples_counted_twice"] for summary in summaries.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
