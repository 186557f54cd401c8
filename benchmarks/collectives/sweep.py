"""Every strategy over sizes, hosts, rates and delays, and the quality of ``auto``'s choices.

Each lab has one rate and one delay, and holds groups of 2, 3 and 4 hosts. Each size of group has one group
per strategy, one for ``auto`` and one for Gloo, which take turns at every message size. A strategy that is
far behind, and further with each size, is not run at bigger sizes. A size at which one operation would take
too long is skipped as well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import plot, report
from benchmarks.ranks.rank_groups import STRATEGY, Contender, RankSet, lab_fleet
from benchmarks.report import REPOSITORY, Spread, durations

SIZES = (*(1024 * 4**step for step in range(9)), 256_000_000)
SMALL = 64 * 1024
RATES = ("20mbit", "100mbit", "1gbit")
DELAYS = ("0ms", "20ms")
ALGORITHMS = ("ring", "tree", "doubling", "exchange", "direct", "star")
NONE = ""  # what Gloo reports
HOPELESS = 2.5
GOAL = 1.10


@dataclass(frozen=True)
class Point:
    """Median seconds of each contender at one size on one network, and the strategy it really used."""

    rate: str
    delay: str
    hosts: int
    size: int
    samples: int
    seconds: Mapping[str, float]
    used: Mapping[str, str]
    first_ratio: float = 0.0

    @property
    def best(self) -> tuple[str, float]:
        """Return the fastest of the strategies that ran as configured."""
        forced = {name: self.seconds[name] for name in ALGORITHMS if self.used.get(name) in (name, NONE)}
        name = min(forced, key=lambda algorithm: forced[algorithm])
        return name, forced[name]

    @property
    def auto_over_best(self) -> float:
        return self.seconds["auto"] / self.best[1]

    @property
    def choice_over_best(self) -> float:
        """Return the chosen strategy's own time over the best one's, without the noise between two equal
        groups.
        """
        return self.seconds.get(self.used["auto"], self.seconds["auto"]) / self.best[1]


@dataclass
class ActiveContenders:
    """Contenders that are still worth running as sizes grow."""

    names: list[str]
    behind: dict[str, list[float]] = field(default_factory=dict)

    def learn(self, point: Point) -> None:
        best = point.best[1]
        for name in list(self.names):
            history = self.behind.setdefault(name, [])
            history.append(point.seconds[name] / best)
            worse = len(history) > 1 and history[-1] >= 0.95 * history[-2] > HOPELESS
            if name in ALGORITHMS and worse:
                self.names.remove(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the sweep")
    group.add_argument("--rates", default=",".join(RATES))
    group.add_argument("--delays", default=",".join(DELAYS))
    group.add_argument("--hosts", default="2,3,4")
    group.add_argument("--point-seconds", type=float, default=6.0, help="time spent on one size")
    group.add_argument("--longest", type=float, default=15.0, help="an operation longer than this is skipped")
    group.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "benchmarks")


def entrants(engines: Sequence[str]) -> list[Contender]:
    if "barnraise" not in engines:
        return [Contender(name, "gloo", {}) for name in ("auto", "ring", "gloo")]
    ours = [Contender(name, "barnraise", {STRATEGY: name}) for name in ("auto", *ALGORITHMS)]
    return [*ours, Contender("gloo", "gloo", {})]


def run(engines: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run all labs one after the other; write the points and the pictures."""
    sizes = [int(word) for word in options.hosts.split(",")]
    points: list[Point] = []
    ours = "barnraise" in engines
    for rate, delay in product(options.rates.split(","), options.delays.split(",")):
        with lab_fleet(hosts=max(sizes), rate=rate, delay=delay, ours=ours) as (_, fleet):
            rank_set = RankSet.gather(fleet, list(range(max(sizes))), entrants(engines), sizes=())
            for size in sizes:
                took = rank_set.part(size).make_groups()
                slowest = max(took, key=lambda name: took[name])
                print(f"{rate} {delay} {size} hosts: group {slowest} made in {took[slowest]:.2f} s")
                points += one_network(rank_set.part(size), rate, delay, options)
    return conclude(points, options.output)


def one_network(rank_set: RankSet, rate: str, delay: str, options: argparse.Namespace) -> list[Point]:
    names = [contender.name for contender in rank_set.contenders]
    running, points, expected = ActiveContenders(list(names)), [], 0.1
    for size in SIZES:
        if expected > options.longest:
            print(
                f"{rate} {delay} {rank_set.size} hosts: skipped from {size:,} bytes on, {expected:.0f} s each"
            )
            break
        point = measured(rank_set, (rate, delay, size), running.names, expected, options.point_seconds)
        points.append(point)
        running.learn(point)
        _show(point)
        growth = SIZES[min(SIZES.index(size) + 1, len(SIZES) - 1)] / size
        expected = max(point.seconds[name] for name in running.names) * (growth if size >= 1 << 18 else 1.5)
    return points


def measured(
    rank_set: RankSet, where: tuple[str, str, int], names: Sequence[str], expected: float, seconds: float
) -> Point:
    """Measure one point; where ``auto`` misses the goal, add samples to the first ones, at most twice."""
    rate, delay, size = where
    labels = {name: f"{name}/{rank_set.size}" for name in names}
    rounds = int(min(max(seconds / (expected * len(names)), 3), 25))
    if size <= SMALL:  # too short to be timed one by one behind a barrier
        how: dict[str, Any] = {"do": "latency", "blocks": rounds, "operations": 8}
    else:
        how = {"do": "all_reduce", "rounds": rounds, "warmup": 1}
    pooled: dict[str, list[float]] = {name: [] for name in names}
    first = 0.0
    for _ in range(3):
        answers = rank_set.ask_some(list(labels.values()), size=size, timeout=1800.0, **how)
        for name, label in labels.items():
            pooled[name] += durations(answers, label)
        medians = {name: Spread.of(values).median for name, values in pooled.items()}
        used = {name: answers[0]["used"][label] for name, label in labels.items()}
        if not any(used.get(name) in (name, NONE) for name in ALGORITHMS):
            raise SystemExit(f"{STRATEGY} was set for each group, but none obeyed it: {used}")
        point = Point(rate, delay, rank_set.size, size, len(pooled["auto"]), medians, used, first)
        first = first or point.auto_over_best
        if point.auto_over_best <= GOAL:
            break
    return replace(point, first_ratio=first)


def _show(point: Point) -> None:
    times = "  ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in point.seconds.items())
    place = f"{point.rate:>8} {point.delay:>5} {point.hosts} hosts {point.size:>12,} B"
    chose = f"auto ({point.used['auto'] or '-'}) {point.auto_over_best:.3f} of it"
    print(f"{place}  {times} ms  best {point.best[0]}, {chose}", flush=True)


def conclude(points: Sequence[Point], output: Path) -> dict[str, Any]:
    """Write the data and the pictures, and return the worst point of ``auto``."""
    output.mkdir(parents=True, exist_ok=True)
    ratios = [point.auto_over_best for point in points]
    worst = points[ratios.index(max(ratios))]
    environment = report.environment_line()
    content = {"environment": environment, "points": [asdict(point) for point in points]}
    (output / "strategies.json").write_text(json.dumps(content, indent=1) + "\n")
    heading = f"All-reduce time over the best strategy's ({time.strftime('%Y-%m-%d')})"
    plot.write(output / "strategies.svg", heading, _panels(points, relative=True), (0.6, 10.0))
    heading = f"All-reduce time in milliseconds ({time.strftime('%Y-%m-%d')})"
    plot.write(output / "times.svg", heading, _panels(points, relative=False), None)
    return {
        "sweep_points": len(points),
        "auto_over_best_worst": max(ratios),
        "auto_over_best_worst_at": f"{worst.rate} {worst.delay} {worst.hosts} hosts {worst.size} B",
        "auto_points_over_goal": sum(ratio > GOAL for ratio in ratios),
        "auto_points_over_goal_at_first": sum(point.first_ratio > GOAL for point in points),
        "auto_choice_over_best_worst": max(point.choice_over_best for point in points),
        "auto_over_best_median": Spread.of(ratios).median,
        "forced_strategy_not_used": sum(_not_used(point) for point in points),
    }


def _not_used(point: Point) -> int:
    """Count the contenders that did not run the strategy they were set to: their figures mean nothing."""
    return sum(point.used.get(name, NONE) not in (name, NONE) for name in ALGORITHMS)


def _panels(points: Sequence[Point], relative: bool) -> list[list[plot.Panel]]:
    networks = list(dict.fromkeys((point.rate, point.delay) for point in points))
    rows = []
    for rate, delay in networks:
        here = [point for point in points if (point.rate, point.delay) == (rate, delay)]
        row = []
        for hosts in dict.fromkeys(point.hosts for point in here):
            lines: dict[str, list[tuple[float, float]]] = {}
            for point in here:
                if point.hosts == hosts:
                    for name, seconds in point.seconds.items():
                        value = seconds / point.best[1] if relative else seconds * 1e3
                        lines.setdefault(name, []).append((point.size, value))
            row.append(plot.Panel(f"{rate}, {delay}, {hosts} hosts", lines))
        rows.append(row)
    return rows
