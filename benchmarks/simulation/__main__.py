"""Trainings that cannot be run here, simulated: a thousand machines in fifty homes; and the lab, to compare.

    python -m benchmarks.simulation --quick           some minutes, nothing is measured
    python -m benchmarks.simulation --measure FILE    four hosts of the lab, about 15 minutes; into FILE
    python -m benchmarks.simulation --quick --against FILE

Four hosts as in benchmarks.plans: 20 million parameters and a second of computing. The figures of the
machines' own work were fitted to two of the measurements; the errors are those of the others. How fast codecs
are was measured by themselves, on a host that shares its cores. The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from barnraise.planning import Level, Levels, ModelSize, Plan, PlanCodec, PlanLimits, StepTimes, make_plans
from barnraise.planning.inputs.codecs import LOSSY
from barnraise.runs.sharding import DataOrder
from barnraise.training.sync import Sync
from benchmarks.report import REPOSITORY, environment_line, last_line, table
from benchmarks.simulation.algorithm_sweep import swept
from benchmarks.simulation.all_reduce import seconds_of
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
from benchmarks.simulation.networks import Churn, World, homes, lab_world
from benchmarks.simulation.render import Bar, Dot, draw
from benchmarks.simulation.training import Costs, Training

PARAMETERS = 20_000_000
MODEL = ModelSize(parameters=PARAMETERS)
BATCH, UNIT, SAMPLE_S = 32, 8, 0.125
HOSTS = 4
COURSE = DataOrder(samples=BATCH << 20, batch=BATCH, micro_batch_size=UNIT, seed=0)
PROFILE = StepTimes(batch=BATCH, unit=UNIT)
# (Mbit/s of each host, way of staying together, batches). Rounds overlap: the line sets the time of those of
# two batches in bf16, and of eight at 20 Mbit/s; computing that of the others.
LAB = (
    (200, "exact", 8),
    (200, "1:int8", 12),
    (200, "2:bf16", 14),
    (200, "4:int8", 22),
    (200, "8:bf16", 34),
    (20, "8:bf16", 18),
    (20, "16:int4", 34),
    (20, "exact", 3),
)
# These show what machines need for a unit besides its computing, and for a sum besides its codec.
ALL_HIDES, NOTHING_HIDES = FITTED = ((200, "8:bf16"), (200, "1:int8"))
MEASURED = REPOSITORY / "docs" / "benchmarks" / "simulation.json"
SWEEP = REPOSITORY / "docs" / "benchmarks" / "strategies.json"
ROUND, LONG_ROUND = 8, 16  # batches: of the first, a thousand machines compute less long than they sum
_AS_THEY_ARE = PlanCodec(name="fp32", bytes_per_parameter=4.0)
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
        """Return the relative error, or None if the case was not measured or was used for the fit."""
        if self.measured_s is None or (self.mbps, self.sync) in FITTED:
            return None
        return abs(self.simulated.step_s / self.measured_s - 1)


class Machine(NamedTuple):
    """Work of a lab host besides computing, and the speed of its codecs."""

    costs: Costs = Costs()
    codecs: tuple[PlanCodec, ...] = LOSSY
    copying: float = 0.0


def on_four_hosts(mbps: int, sync: str, batches: int, machine: Machine) -> Figures:
    world = lab_world(HOSTS, mbps, 0, 1 / SAMPLE_S)
    links = world.links._replace(codecs=machine.codecs, copying=machine.copying)
    world = world._replace(links=links)
    training = train(world, COURSE, PARAMETERS, machine.costs, sync_named(sync))
    run(training, batches)
    return figures(training.commits, SAMPLE_S * BATCH / HOSTS)


def compare(measured: Measurement) -> list[Compared]:
    known = {(session["mbps"], session["sync"]): session["step_s"] for session in measured.sessions}
    machine = fitted(known, measured.codecs())
    return [
        Compared(
            mbps,
            sync,
            planned_s(mbps, sync_named(sync)),
            on_four_hosts(mbps, sync, batches, machine),
            known.get((mbps, sync)),
        )
        for mbps, sync, batches in LAB
    ]


def fitted(known: Mapping[tuple[int, str], float], codecs: tuple[PlanCodec, ...]) -> Machine:
    """Fit a machine's own work to two of the measurements.

    The work is the same for each unit. Before each encoded sum it is longer in proportion to the time of its
    codec.
    """
    machine = Machine(codecs=codecs)
    missing = _missing(ALL_HIDES, known, machine)
    machine = machine._replace(costs=Costs(unit_s=missing / (BATCH / UNIT / HOSTS)))
    missing = _missing(NOTHING_HIDES, known, machine)
    return machine._replace(copying=missing / seconds_of("int8", codecs, PARAMETERS))


def _missing(way: tuple[int, str], known: Mapping[tuple[int, str], float], machine: Machine) -> float:
    batches = next(batches for mbps, sync, batches in LAB if (mbps, sync) == way)
    return max(0.0, known[way] - on_four_hosts(*way, batches, machine).step_s) if way in known else 0.0


def planned_s(mbps: int, sync: Sync) -> float:
    """Return the step time that the planner predicts before it has any measurement."""
    level = Level(codec=sync.codec, period=sync.period)
    options = PlanLimits(sync="auto", is_given=True, is_flat=True, overlaps=True, levels=Levels(inside=level))
    return make_plans(lab_world(HOSTS, mbps, 0, 1 / SAMPLE_S).cluster, MODEL, PROFILE, options).chosen.step_s


def left_to_the_planner(mbps: int) -> tuple[Figures, float]:
    """Return the figures that the session's own planner reaches on four hosts, and the time of its change."""
    world = lab_world(HOSTS, mbps, 0, 1 / SAMPLE_S)
    training = train(world, COURSE, PARAMETERS, Costs())
    with chosen_while_training(training, MODEL, PROFILE, "auto", graph_of(world)):
        run(training, 400)
    changed = next(commit.at for commit in training.commits if commit.sync != Sync())
    return figures(training.commits, SAMPLE_S * BATCH / HOSTS), changed


def measure(path: Path) -> None:
    """Measure the same on real hosts, with real sessions: every case that the file does not contain yet."""
    from benchmarks.agents.machines import Machines
    from benchmarks.plans.__main__ import Bench
    from lab import Lab

    sessions, mb_per_s = known_in(path)
    known = {(session["mbps"], session["sync"]) for session in sessions}
    missing = [case for case in LAB if case[:2] not in known]
    for mbps in dict.fromkeys(mbps for mbps, _, _ in missing):
        with (
            tempfile.TemporaryDirectory(prefix="by-sim-") as room,
            Lab(hosts=HOSTS, rate=f"{mbps}mbit") as lab,
            Machines(lab.hosts) as machines,
        ):
            machines.form()
            bench = Bench(machines, Path(room))
            bench.graph()  # while links are measured nothing else travels on them
            mb_per_s = mb_per_s or {codec.name: codec.mb_per_s or 0.0 for codec in bench.codecs(LOSSY)}
            for sync, batches in [(sync, batches) for rate, sync, batches in missing if rate == mbps]:
                where = environment_line()
                hosts = ",".join(f"h{number}" for number in range(HOSTS))
                result = bench.run("planned.py", hosts, SYNC=sync, BATCHES=str(batches), UNIT=str(UNIT))
                sessions.append({"mbps": mbps, "sync": sync, "environment": where, **result})
                print(f"{mbps} Mbit/s, {sync}: {result['step_s']:.3f} s a batch", flush=True)
                content = {"codecs_mb_per_s": mb_per_s, "measured": sessions}
                path.write_text(json.dumps(content, indent=1) + "\n")


class Measurement(NamedTuple):
    """Sessions of the lab, and how fast its hosts write and read codecs while all of them do."""

    sessions: list[dict[str, Any]]
    mb_per_s: dict[str, float]

    def codecs(self) -> tuple[PlanCodec, ...]:
        return tuple(
            replace(codec, mb_per_s=self.mb_per_s.get(codec.name, codec.mb_per_s)) for codec in LOSSY
        )


def known_in(path: Path) -> Measurement:
    content = json.loads(path.read_text()) if path.exists() else {}
    return Measurement(content.get("measured", []), content.get("codecs_mb_per_s", {}))


def single_sums(dots: list[Dot]) -> dict[str, Any]:
    """Compare single sums of the strategies that the session would use on lines of up to 100 Mbit/s."""
    all_reduces = list(swept(SWEEP))
    rows = [
        [
            f"{all_reduce.mbps:g} Mbit/s, {all_reduce.delay_ms:g} ms",
            all_reduce.size,
            all_reduce.strategy,
            "auto" if all_reduce.is_auto else "",
        ]
        + [f"{seconds:.3f}" for seconds in (all_reduce.simulated_s, all_reduce.measured_s, all_reduce.off)]
        for all_reduce in all_reduces
    ]
    print(
        table(["a sum, 4 hosts", "bytes", "strategy", "", "simulated s", "measured s", "off"], rows),
        flush=True,
    )
    dots += [
        Dot(all_reduce.measured_s, all_reduce.simulated_s, "taken" if all_reduce.is_auto else "other")
        for all_reduce in all_reduces
    ]
    errors = [all_reduce.off for all_reduce in all_reduces if all_reduce.is_auto]
    return {
        "sum_error_median": statistics.median(errors),
        "sum_error_worst": max(errors),
        "sum_error_median_all": statistics.median(all_reduce.off for all_reduce in all_reduces),
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
        self.trainings: list[Training] = []
        self.phases: list[Many] = []

    def _new(self) -> tuple[World, Training]:
        world = homes(self.sites, self.machines, seed=1)
        course = DataOrder(
            samples=self.batch << 20, batch=self.batch, micro_batch_size=SAMPLES_EACH // 2, seed=0
        )
        return world, train(world, course, PARAMETERS, Costs())

    def plan(self, period: int = 1) -> Plan:
        """Return a plan of all sites, each taken as one machine, because planners accept at most 256.

        In rounds, changes are sent uncompressed: sites do not support anything else.
        """
        profile = StepTimes(batch=self.batch, unit=SAMPLES_EACH // 2)
        options = PlanLimits(is_given=True, is_flat=True)
        if period > 1:
            level = Level(codec=_AS_THEY_ARE.name, period=period)
            options = replace(
                options,
                sync="auto",
                overlaps=self.training.overlaps,
                codecs=(_AS_THEY_ARE,),
                levels=Levels(inside=level),
            )
        plan = make_plans(self.world.cluster, MODEL, profile, options).chosen
        print(f"The planner, of {self.sites} sites as machines: {plan.name}, {plan.step_s:.1f} s", flush=True)
        return plan

    def undisturbed(self) -> None:
        """Run exact steps, and then rounds of the same training, which overlap from the second kind on."""
        self._follow(self.plan())
        self.begin()
        self._until(1)
        self._note("every step", 1, None)
        self.training.overlaps = False
        for period in (ROUND, ROUND, LONG_ROUND):
            self._change(period)
            words = "overlapped" if self.training.overlaps else "not overlapped"
            self._note(f"rounds of {period}, {words}", 1, self.plan(period).step_s)
            self.training.overlaps = True

    def _change(self, period: int) -> None:
        """Change the period, and run until the first of these rounds is over: it had no sum beside it."""
        self.training.wanted = Sync(period=period)
        self.world.clock.run_until(lambda: self.training.sync.period == period)
        self._until(1)

    def _follow(self, plan: Plan) -> None:
        """Run the training as the plan says, which is more than the session supports yet."""
        self.begin()
        order = [int(name.removeprefix("site ")) for name in plan.order]
        sites = tuple(self.world.links.sites[site] for site in order)
        shape = plan.levels[0].all_reduce
        self.training.links = self.world.links._replace(sites=sites, across=shape)
        self._until(1)
        self._note(f"every step, sites in a {shape}", 1, plan.step_s)

    def begin(self) -> None:
        self.world, self.training = self._new()
        self.trainings.append(self.training)
        self.training.begin()

    def with_deaths(self, life_s: float, commits: int) -> None:
        """Continue the same training while machines die."""
        period = self.training.sync.period
        churn = Churn(self.world, self.training, 2, life_s, life_s / 20, STATE_BYTES * PARAMETERS)
        name = "every step" if period == 1 else f"rounds of {period}, overlapped"
        self._note(f"{name}, machines live {life_s / 3600:g} h", commits, None, churn)

    def _until(self, more: int) -> None:
        wanted = len(self.training.commits) + more
        self.world.clock.run_until(lambda: len(self.training.commits) >= wanted)

    def _note(self, name: str, commits: int, predicted_s: float | None, churn: Churn | None = None) -> None:
        before, begin = [wire.carried for wire in self.world.wires], self.world.clock.now
        self._until(commits)
        pairs = zip(self.world.wires, before, strict=True)
        carried = tuple(wire.carried - already for wire, already in pairs)
        commits_made = self.training.commits[-commits:]
        elapsed = self.world.clock.now - begin
        step_s = elapsed / sum(commit.batches for commit in commits_made)
        busy_s = self.batch / sum(self.world.speeds.values())
        measured = Figures(step_s, busy_s / step_s, commits_made[-1].sync)
        deaths = churn.deaths if churn else 0
        self.phases.append(Many(name, predicted_s, measured, commits, elapsed, carried, deaths))
        link, share = fullest(self.world.wires, carried, elapsed)
        megabytes = carried[self.world.wires.index(link)] / commits / 1e6
        print(
            f"{name}: {step_s:.1f} s a batch, computing {measured.utilisation:.0%}; {link.name} "
            f"({link.rate * 8e-6:.0f} Mbit/s) carries {megabytes:.0f} MB for each commit "
            f"and is busy {share:.0%}; {deaths} deaths",
            flush=True,
        )

    def figures(self) -> dict[str, Any]:
        planned, exact, apart, rounds, long_rounds = self.phases[:5]
        ledgers = [training.ledger for training in self.trainings]
        recomputed = [
            training.ledger.computed - training.ledger.once - training.in_hand for training in self.trainings
        ]
        link, share = fullest(self.world.wires, exact.carried, exact.elapsed_s)
        return {
            "nodes": len(self.world.speeds),
            "sites": self.sites,
            "step_s": exact.figures.step_s,
            "planned_step_s": planned.predicted_s,
            "planned_step_s_simulated": planned.figures.step_s,
            "round_step_s_not_overlapped": apart.figures.step_s,
            "round_step_s": rounds.figures.step_s,
            "round_step_s_planned": rounds.predicted_s,
            "long_round_step_s": long_rounds.figures.step_s,
            "long_round_step_s_planned": long_rounds.predicted_s,
            "uplink_bytes_per_step": statistics.median(exact.carried) / exact.commits,
            "limits": link.name,
            "limit_mbps": link.rate * 8e-6,
            "limit_busy": share,
            **{f"{phase.name}: s a step": phase.figures.step_s for phase in self.phases[5:]},
            "deaths": sum(phase.deaths for phase in self.phases),
            "units_lost": sum(ledger.lost for ledger in ledgers),
            "units_doubled": sum(ledger.doubled for ledger in ledgers),
            "units_computed_again": sum(recomputed),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps of the thousand machines")
    parser.add_argument("--only", choices=["four", "homes"])
    parser.add_argument("--sites", type=int, default=50)
    parser.add_argument("--machines", type=int, default=20, help="of each site")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure in the lab what FILE has not")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an SVG of both parts")
    parser.add_argument("--against", type=Path, metavar="FILE", default=MEASURED, help="what was measured")
    options = parser.parse_args()
    print(environment_line())
    if options.measure:
        measure(options.measure)
        return 0
    result: dict[str, Any] = {}
    dots: list[Dot] = []
    bars: list[Bar] = []
    if options.only != "four":
        thousand = Thousand(options.sites, options.machines)
        thousand.undisturbed()
        thousand.with_deaths(24 * 3600.0, 2 if options.quick else 10)
        thousand.begin()
        thousand.with_deaths(24 * 3600.0, 2 if options.quick else 10)
        result |= thousand.figures()
        bars = [Bar(phase.name, phase.figures.step_s, phase.figures.busy_s) for phase in thousand.phases]
    if options.only != "homes":
        result |= four_hosts(known_in(options.against), dots)
    if options.picture and dots and bars:
        draw(options.picture, dots, bars)
    last_line(result)
    return 0


def four_hosts(measured: Measurement, dots: list[Dot]) -> dict[str, Any]:
    compared = compare(measured)
    dots += [
        Dot(case.measured_s, case.simulated.step_s, "session")
        for case in compared
        if case.measured_s is not None
    ]
    rows = [
        [
            f"{case.mbps} Mbit/s",
            case.sync,
            case.planned_s,
            case.simulated.step_s,
            case.measured_s,
            case.off,
            case.simulated.utilisation,
        ]
        for case in compared
    ]
    print(
        table(["4 hosts", "way", "planned s", "simulated s", "measured s", "off", "utilisation"], rows),
        flush=True,
    )
    result: dict[str, Any] = {}
    for mbps in dict.fromkeys(case.mbps for case in compared):
        planned, at = left_to_the_planner(mbps)
        print(
            f"{mbps} Mbit/s, left to the planner: {planned.sync.describe()} after {at:.0f} s; "
            f"{planned.step_s:.3f} s a batch",
            flush=True,
        )
        result[f"auto_step_s_{mbps}mbit"] = planned.step_s
    result |= single_sums(dots)
    errors = [case.off for case in compared if case.off is not None]
    if errors:
        result |= {"lab_error_median": statistics.median(errors), "lab_error_worst": max(errors)}
    return result


if __name__ == "__main__":
    raise SystemExit(main())
