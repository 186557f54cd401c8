"""Trainings that cannot be run here, simulated: a thousand machines in fifty homes; and the lab, to compare.

    python -m benchmarks.simulated_runs --quick           some minutes, nothing is measured
    python -m benchmarks.simulated_runs --measure FILE    four hosts of the lab, about 15 minutes; into FILE
    python -m benchmarks.simulated_runs --quick --against FILE

Four hosts as in benchmarks/plans.py: 20 million parameters and a second of computing. The figures of the
machines' own work were fitted to one of the measurements; the errors are those of the others. The last line
is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from backyard.planning import Level, Levels, Model, Options, Plan, StepProfile, make_plans
from backyard.runs.leases import Course
from backyard.training.sync import Sync
from benchmarks.report import REPOSITORY, environment_line, last_line, table
from benchmarks.simulation.figures import (
    Figures,
    chosen_while_training,
    figures,
    fullest,
    graph_of,
    run,
    sync_named,
    train,
)
from benchmarks.simulation.picture import Bar, Dot, draw
from benchmarks.simulation.sweep import swept
from benchmarks.simulation.training import Costs, Ledger, Training
from benchmarks.simulation.worlds import Churn, World, homes, lab_world

PARAMETERS = 20_000_000
MODEL = Model(parameters=PARAMETERS)
BATCH, UNIT, SAMPLE_S = 32, 2, 0.125
HOSTS = 4
COURSE = Course(samples=BATCH << 20, batch=BATCH, unit=UNIT, seed=0)
PROFILE = StepProfile(batch=BATCH, unit=UNIT)
# (Mbit/s of each host, way of staying together, batches)
LAB = (
    (200, "exact", 8),
    (200, "1:int8", 12),
    (200, "8:bf16", 34),
    (20, "exact", 3),
    (20, "8:bf16", 18),
    (20, "64:int4", 130),
)
FITTED = (200, "8:bf16")  # shows what machines need for a unit besides its computing
MEASURED = REPOSITORY / "docs" / "benchmarks" / "simulation.json"
SWEEP = REPOSITORY / "docs" / "benchmarks" / "strategies.json"
STATE_BYTES = 12.0  # of a parameter: weights and two moments
SAMPLES_EACH = 8  # of a step, for each machine


class Compared(NamedTuple):
    """A way of staying together on four hosts: what the simulation says, and what was measured."""

    mbps: int
    sync: str
    planned_s: float
    simulated: Figures
    measured_s: float | None

    @property
    def off(self) -> float | None:
        """None of what was not measured, and of what the simulation was fitted to."""
        if self.measured_s is None or (self.mbps, self.sync) == FITTED:
            return None
        return abs(self.simulated.step_s / self.measured_s - 1)


def on_four_hosts(mbps: int, sync: str, batches: int, costs: Costs) -> Figures:
    training = train(lab_world(HOSTS, mbps, 0, 1 / SAMPLE_S), COURSE, PARAMETERS, costs, sync_named(sync))
    run(training, batches)
    return figures(training.commits, SAMPLE_S * BATCH / HOSTS)


def compare(measured: Sequence[dict[str, Any]]) -> list[Compared]:
    known = {(one["mbps"], one["sync"]): one["step_s"] for one in measured}
    costs = fitted(known.get(FITTED))
    return [
        Compared(
            mbps,
            sync,
            planned_s(mbps, sync_named(sync)),
            on_four_hosts(mbps, sync, batches, costs),
            known.get((mbps, sync)),
        )
        for mbps, sync, batches in LAB
    ]


def fitted(measured_s: float | None) -> Costs:
    """What is missing in one of the measurements is the machines' own work, the same for each unit."""
    if measured_s is None:
        return Costs()
    batches = next(batches for mbps, sync, batches in LAB if (mbps, sync) == FITTED)
    missing = measured_s - on_four_hosts(*FITTED, batches, Costs()).step_s
    return Costs(unit_s=max(0.0, missing) / (BATCH / UNIT / HOSTS))


def planned_s(mbps: int, sync: Sync) -> float:
    """What the planner predicts for it, before it has learnt anything."""
    level = Level(codec=sync.codec, period=sync.period)
    options = Options(sync="auto", is_given=True, is_flat=True, overlaps=False, levels=Levels(inside=level))
    return make_plans(lab_world(HOSTS, mbps, 0, 1 / SAMPLE_S).cluster, MODEL, PROFILE, options).chosen.step_s


def left_to_the_planner(mbps: int) -> tuple[Figures, float]:
    """What the session's own planner takes on four hosts, and when."""
    world = lab_world(HOSTS, mbps, 0, 1 / SAMPLE_S)
    training = train(world, COURSE, PARAMETERS, Costs())
    with chosen_while_training(training, MODEL, PROFILE, "auto", graph_of(world)):
        run(training, 400)
    changed = next(one.at for one in training.commits if one.sync != Sync())
    return figures(training.commits, SAMPLE_S * BATCH / HOSTS), changed


def measure(path: Path) -> None:
    """The same on real hosts, with real sessions."""
    from benchmarks.machines import Machines
    from benchmarks.plans import Bench
    from lab import Lab

    found: list[dict[str, Any]] = []
    for mbps in dict.fromkeys(mbps for mbps, _, _ in LAB):
        with (
            tempfile.TemporaryDirectory(prefix="by-sim-") as room,
            Lab(hosts=HOSTS, rate=f"{mbps}mbit") as lab,
            Machines(lab.hosts) as machines,
        ):
            machines.form()
            bench = Bench(machines, Path(room))
            for sync, batches in [(sync, batches) for rate, sync, batches in LAB if rate == mbps]:
                begin = time.monotonic()
                hosts = ",".join(f"h{one}" for one in range(HOSTS))
                got = bench.run("planned.py", hosts, SYNC=sync, BATCHES=str(batches))
                found.append({"mbps": mbps, "sync": sync, **got})
                took = time.monotonic() - begin
                print(f"{mbps} Mbit/s, {sync}: {got['step_s']:.3f} s a batch ({took:.0f} s)", flush=True)
                path.write_text(json.dumps({"environment": environment_line(), "measured": found}, indent=1))


def single_sums(dots: list[Dot]) -> dict[str, Any]:
    """Of those that the session would take on lines of up to 100 Mbit/s."""
    sums = list(swept(SWEEP))
    rows = [
        [f"{one.mbps:g} Mbit/s, {one.delay_ms:g} ms", one.size, one.strategy, "auto" if one.is_auto else ""]
        + [f"{seconds:.3f}" for seconds in (one.simulated_s, one.measured_s, one.off)]
        for one in sums
    ]
    print(
        table(["a sum, 4 hosts", "bytes", "strategy", "", "simulated s", "measured s", "off"], rows),
        flush=True,
    )
    dots += [Dot(one.measured_s, one.simulated_s, "taken" if one.is_auto else "other") for one in sums]
    taken = [one.off for one in sums if one.is_auto]
    return {
        "sum_error_median": statistics.median(taken),
        "sum_error_worst": max(taken),
        "sum_error_median_all": statistics.median(one.off for one in sums),
    }


class Many(NamedTuple):
    """A training of many machines between two moments, and what its links carried meanwhile."""

    name: str
    predicted_s: float | None
    figures: Figures
    commits: int
    elapsed_s: float
    carried: tuple[float, ...]  # by wire, in bytes
    deaths: int = 0


class Thousand:
    """Simulates one training after another, and tells what it finds."""

    def __init__(self, sites: int, machines: int) -> None:
        self.sites, self.machines = sites, machines
        self.batch = SAMPLES_EACH * sites * machines
        self.world, self.training = self._new()
        self.ledgers: list[Ledger] = []
        self.found: list[Many] = []

    def _new(self) -> tuple[World, Training]:
        world = homes(self.sites, self.machines, seed=1)
        course = Course(samples=self.batch << 20, batch=self.batch, unit=SAMPLES_EACH // 2, seed=0)
        return world, train(world, course, PARAMETERS, Costs())

    def plan(self) -> Plan:
        """Of all sites, each taken for one machine: planners know 256 at most."""
        profile = StepProfile(batch=self.batch, unit=SAMPLES_EACH // 2)
        options = Options(is_given=True, is_flat=True)
        return make_plans(self.world.cluster, MODEL, profile, options).chosen

    def undisturbed(self, period: int) -> None:
        """Exact steps, and then rounds of the same training."""
        plan = self.plan()
        print(f"The planner, of {self.sites} sites as machines: {plan.name}, {plan.step_s:.1f} s", flush=True)
        self._follow(plan)
        self._begin()
        self._until(1)
        self._note("every step", 1, None)
        self.training.wanted = Sync(period=period)
        self._until(1)
        self._note(f"rounds of {period} steps", 1, None)

    def _follow(self, plan: Plan) -> None:
        """As the plan says it, which is more than the session can do yet."""
        self._begin()
        order = [int(name.removeprefix("site ")) for name in plan.order]
        sites = tuple(self.world.links.sites[site] for site in order)
        shape = plan.levels[0].all_reduce
        self.training.links = self.world.links._replace(sites=sites, across=shape)
        self._until(1)
        self._note(f"every step, sites in a {shape}", 1, plan.step_s)

    def _begin(self) -> None:
        self.world, self.training = self._new()
        self.ledgers.append(self.training.ledger)
        self.training.begin()

    def with_deaths(self, life_s: float, commits: int) -> None:
        self._begin()
        state = STATE_BYTES * PARAMETERS
        churn = Churn(self.world, self.training, 2, life_s, life_s / 20, state)
        self._note(f"every step, machines live {life_s / 3600:g} h", commits, None, churn)

    def _until(self, more: int) -> None:
        wanted = len(self.training.commits) + more
        self.world.clock.run_until(lambda: len(self.training.commits) >= wanted)

    def _note(self, name: str, commits: int, predicted_s: float | None, churn: Churn | None = None) -> None:
        before, begin = [wire.carried for wire in self.world.wires], self.world.clock.now
        self._until(commits)
        pairs = zip(self.world.wires, before, strict=True)
        carried = tuple(wire.carried - already for wire, already in pairs)
        made = self.training.commits[-commits:]
        elapsed = self.world.clock.now - begin
        step_s = elapsed / sum(one.batches for one in made)
        busy_s = self.batch / sum(self.world.speeds.values())
        found = Figures(step_s, busy_s / step_s, made[-1].sync)
        deaths = churn.deaths if churn else 0
        self.found.append(Many(name, predicted_s, found, commits, elapsed, carried, deaths))
        link, share = fullest(self.world.wires, carried, elapsed)
        most = carried[self.world.wires.index(link)] / commits / 1e6
        print(
            f"{name}: {step_s:.1f} s a batch, computing {found.utilisation:.0%}; {link.name} "
            f"({link.rate * 8e-6:.0f} Mbit/s) carries {most:.0f} MB for each commit and is busy {share:.0%}; "
            f"{deaths} deaths",
            flush=True,
        )

    def figures(self) -> dict[str, Any]:
        planned, exact, rounds = self.found[:3]
        link, share = fullest(self.world.wires, exact.carried, exact.elapsed_s)
        return {
            "nodes": len(self.world.speeds),
            "sites": self.sites,
            "step_s": exact.figures.step_s,
            "planned_step_s": planned.predicted_s,
            "planned_step_s_simulated": planned.figures.step_s,
            "round_step_s": rounds.figures.step_s,
            "uplink_bytes_per_step": statistics.median(exact.carried) / exact.commits,
            "limits": link.name,
            "limit_mbps": link.rate * 8e-6,
            "limit_busy": share,
            **{f"{one.name}: s a step": one.figures.step_s for one in self.found[3:]},
            "deaths": sum(one.deaths for one in self.found),
            "units_lost": sum(ledger.lost for ledger in self.ledgers),
            "units_doubled": sum(ledger.doubled for ledger in self.ledgers),
            "units_computed_again": sum(ledger.computed - ledger.once for ledger in self.ledgers),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps of the thousand machines")
    parser.add_argument("--only", choices=["four", "homes"])
    parser.add_argument("--sites", type=int, default=50)
    parser.add_argument("--machines", type=int, default=20, help="of each site")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure in the lab, and nothing else")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an SVG of both parts")
    parser.add_argument("--against", type=Path, metavar="FILE", default=MEASURED, help="what was measured")
    options = parser.parse_args()
    print(environment_line())
    if options.measure:
        measure(options.measure)
        return 0
    result: dict[str, Any] = {}
    dots: list[Dot] = []
    if options.only != "homes":
        known = json.loads(options.against.read_text())["measured"] if options.against.exists() else []
        result |= four_hosts(known, dots)
    if options.only != "four":
        thousand = Thousand(options.sites, options.machines)
        thousand.undisturbed(period=8)
        thousand.with_deaths(24 * 3600.0, 2 if options.quick else 10)
        if not options.quick:
            thousand.with_deaths(6 * 3600.0, 2)
        result |= thousand.figures()
        if options.picture and dots:
            bars = [Bar(one.name, one.figures.step_s, one.figures.busy_s) for one in thousand.found]
            draw(options.picture, dots, bars)
    last_line(result)
    return 0


def four_hosts(measured: Sequence[dict[str, Any]], dots: list[Dot]) -> dict[str, Any]:
    compared = compare(measured)
    dots += [
        Dot(one.measured_s, one.simulated.step_s, "session") for one in compared if one.measured_s is not None
    ]
    rows = [
        [
            f"{one.mbps} Mbit/s",
            one.sync,
            one.planned_s,
            one.simulated.step_s,
            one.measured_s,
            one.off,
            one.simulated.utilisation,
        ]
        for one in compared
    ]
    print(
        table(["4 hosts", "way", "planned s", "simulated s", "measured s", "off", "utilisation"], rows),
        flush=True,
    )
    result: dict[str, Any] = {}
    for mbps in dict.fromkeys(one.mbps for one in compared):
        found, at = left_to_the_planner(mbps)
        print(
            f"{mbps} Mbit/s, left to the planner: {found.sync.sentence()} after {at:.0f} s; "
            f"{found.step_s:.3f} s a batch",
            flush=True,
        )
        result[f"auto_step_s_{mbps}mbit"] = found.step_s
    result |= single_sums(dots)
    off = [one.off for one in compared if one.off is not None]
    if off:
        result |= {"lab_error_median": statistics.median(off), "lab_error_worst": max(off)}
    return result


if __name__ == "__main__":
    raise SystemExit(main())
