"""Predictions of the planner against measurements, the quality of its choices, and their cost in loss.

    python -m benchmarks.plans --quick     about 25 minutes
    python -m benchmarks.plans             every network of the table, three seeds
    python -m benchmarks.plans --only quality --ways 8:int8 1:int4      what these cost

With ``--pictures FOLDER`` the times (plans.svg) and the losses (losses.svg) are drawn there.

For each network of the lab, the session runs by hand as each plan for its hosts says. The model has 20
million parameters, and computing is a timed wait, because two cores carry all hosts. As in a session, the
measured exact step and speeds calibrate the prediction of the other plans.

Utilisation compares training alone with training together, for the same samples. It is the time in which all
hosts train their parts alone, but at once so that they share the cores, over the time together.

``chosen_over_best`` compares the chosen plan with the other plans that were tried. Of each kind and codec,
the plan with the best prediction is tried, unless its prediction is four times that of the chosen plan. A
plan that was wrongly predicted to be slow is not among them; ``plans_not_tried`` counts the plans left out.
DDP on Gloo, unencrypted and with the same computing, is measured as well.

Quality: a character transformer with four workers on one host, as chosen and with exact steps, same seeds.
The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from barnraise.agent_client.run_requests import GraphRequest, GraphResponse
from barnraise.planning import (
    Calibration,
    ModelSize,
    Plan,
    PlanCluster,
    PlanCodec,
    PlanLimits,
    PlanRanking,
    StepTimes,
    make_plans,
    observation,
    refit,
)
from barnraise.topology.graph import TopologyGraph, decode_graph
from barnraise.training.autotune.codec_benchmark import measure_codecs
from barnraise.training.autotune.tuner import CODECS, cluster_of_group, sync_of
from benchmarks import plot
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, figures_in
from benchmarks.report import environment_line, last_line, table
from lab import Lab

PROGRAMS = Path(__file__).parents[1] / "programs"
PARAMETERS = 20_000_000
BATCH = 32
SAMPLE_S = 0.125  # of one host: a batch takes four hosts a second
MODEL = ModelSize(parameters=PARAMETERS)
# The timed wait is over when backward begins: gradients have nothing to hide behind.
PROFILE = StepTimes(batch=BATCH, unit=BATCH // 4, backward_share=0.0)
CHARACTERS = 400  # batches


class Network(NamedTuple):
    hosts: int
    mbps: int
    delay_ms: int

    def __str__(self) -> str:
        return f"{self.hosts} hosts, {self.mbps} Mbit/s, {self.delay_ms} ms"


QUICK = (Network(4, 200, 0), Network(4, 20, 0))
WHOLE = tuple(Network(*values) for values in itertools.product((2, 4), (1000, 200, 50, 20), (0, 20)))


class Tried(NamedTuple):
    """A plan, and the session that followed it."""

    plan: Plan
    predicted_s: float
    step_s: float

    @property
    def off(self) -> float:
        return abs(self.predicted_s / self.step_s - 1)


class Measured(NamedTuple):
    """Measurements on one network: the plans as they were followed, the last one by a single host."""

    ranking: PlanRanking
    tried: list[Tried]
    gloo_s: float  # a step of DDP
    apart_s: float  # of the hosts, each with its part of a batch and by itself


class Bench:
    """A formed cluster on one network."""

    def __init__(self, machines: Machines, directory: Path) -> None:
        self._machines, self._line = machines, CommandLine(machines)
        self._folder = directory / "project"
        shutil.copytree(PROGRAMS, self._folder)

    def cluster(self, speed: float) -> PlanCluster:
        """Return the cluster for the planner; ``speed``: samples per second of each host."""
        graph = self.graph()
        nodes = [facts.node for facts in graph.nodes]
        return cluster_of_group(graph, MODEL, nodes, [speed] * len(nodes))

    def codecs(self, wanted: Sequence[PlanCodec] = CODECS) -> tuple[PlanCodec, ...]:
        """Measure the codecs, and scale their speed to all hosts encoding at once."""
        torch.set_num_threads(1)
        share = min(1.0, (os.cpu_count() or 1) / len(self._machines.hosts))
        codecs = measure_codecs(wanted)
        return tuple(replace(codec, mb_per_s=share * (codec.mb_per_s or 1.0)) for codec in codecs)

    def graph(self) -> TopologyGraph:
        """Return the topology graph once every link of it is measured."""
        count = len(self._machines.hosts)
        wanted = count * (count - 1) // 2
        self._machines.until(lambda: _measured(self._graph()) >= wanted, 300.0, "all links are measured")
        return self._graph()

    def _graph(self) -> TopologyGraph:
        return decode_graph(self._machines.ask(0, GraphRequest(), GraphResponse).graph)

    def follow(self, plan: Plan) -> dict[str, Any]:
        """Run the session as a plan says."""
        hosts = range(len(plan.order))
        sync = sync_of(plan, PROFILE, len(plan.order))
        text = f"{sync.period}:{sync.codec}" if sync.is_local or sync.is_encoded else "exact"
        # The first commit is exact, and carries the word; whole rounds follow.
        rounds = 3 if sync.period > 8 else 5
        batches = 2 + rounds * sync.period if sync.is_local else _batches(plan)
        on = ",".join(f"h{host}" for host in hosts)
        figures = self.run("planned.py", on, SYNC=text, BATCHES=str(batches))
        print(f"  {plan.name}: predicted {plan.step_s:.3f} s, took {figures['step_s']:.3f} s", flush=True)
        return figures

    def apart(self) -> float:
        """Return the seconds for a batch split over all hosts, each training its part alone, at once."""
        hosts = len(self._machines.hosts)
        share = BATCH // hosts
        words = ["--set", f"BATCH={share}", "--set", f"UNIT={share}", "--set", "OMP_NUM_THREADS=1"]
        started = [
            self._line.start(host, "run", "--on", f"h{host}", *words, "planned.py", folder=self._folder)
            for host in range(hosts)
        ]
        for process in started:
            process.wait(300.0)
        seconds: list[float] = [figures_in(process.output())["step_s"] for process in started]
        return statistics.mean(seconds)

    def gloo(self, exact: Plan) -> float:
        """Return the seconds of a step of plain DDP on Gloo."""
        on = ",".join(f"h{host}" for host in range(len(exact.order)))
        # All hosts of the lab have one name, which leads nowhere.
        given = {"SYNC": "ddp", "BATCHES": str(_batches(exact)), "GLOO_SOCKET_IFNAME": "eth0"}
        seconds: float = self.run("planned.py", on, "--engine", "gloo", "--trust-fabric", **given)["step_s"]
        print(f"  DDP on Gloo: took {seconds:.3f} s", flush=True)
        return seconds

    def run(self, program: str, on: str, *more: str, **variables: str) -> dict[str, Any]:
        words = [word for name, value in variables.items() for word in ("--set", f"{name}={value}")]
        words += ["--set", "OMP_NUM_THREADS=1", *more]
        done = self._line.run(0, "run", "--on", on, *words, program, folder=self._folder, timeout=1500)
        return figures_in(done.stdout + done.stderr)


_APART_TIMES = 3
_HOPELESS = 4.0  # times the step of the chosen plan: what is predicted to be slower is not tried


def _batches(plan: Plan) -> int:
    """Return the number of batches that take about a minute."""
    return max(4, min(16, int(60 / plan.step_s)))


def _measured(graph: TopologyGraph) -> int:
    return sum(link.mbps is not None for link in graph.links)


def candidates(ranking: PlanRanking) -> list[Plan]:
    """Return the chosen plan, and the best plan of each other kind that a session of all these hosts
    supports.
    """
    hosts = len(ranking.chosen.order)
    best: dict[tuple[object, ...], Plan] = {}
    for plan in ranking.plans:
        is_possible = len(plan.order) == hosts and (plan.kind != "local_steps" or plan.is_overlapped)
        if is_possible and plan.codec in ("exact", "int8", "int4"):
            best.setdefault((plan.kind, plan.codec), plan)
    exact = [plan for plan in best.values() if plan.is_exact]
    others = [
        plan
        for plan in best.values()
        if not plan.is_exact
        and plan is not ranking.chosen
        and plan.step_s < _HOPELESS * ranking.chosen.step_s
    ]
    chosen = [] if ranking.chosen.is_exact else [ranking.chosen]
    return [*exact, *chosen, *others, ranking.best_alone]


def measure(bench: Bench) -> Measured:
    every_step = PlanLimits(is_given=True, is_flat=True)
    exact = make_plans(bench.cluster(1 / SAMPLE_S), MODEL, PROFILE, every_step).chosen
    measured = bench.follow(exact)
    gloo_s = bench.gloo(exact)
    apart_s = statistics.median(bench.apart() for _ in range(_APART_TIMES))
    tried = [Tried(exact, exact.step_s, measured["step_s"])]
    # From here on as the session plans: with the speeds and the step that it has seen.
    cluster = bench.cluster(statistics.mean(measured["speeds"]))
    followed = make_plans(cluster, MODEL, PROFILE, every_step).chosen
    calibration = refit(Calibration(), observation(followed, cluster, measured["step_s"]))
    options = PlanLimits(sync="auto", is_given=True, is_flat=True, overlaps=True, codecs=bench.codecs())
    ranking = make_plans(cluster, MODEL, PROFILE, options, calibration)
    for plan in candidates(ranking):
        if plan.is_exact and len(plan.order) > 1:
            continue
        figures = bench.follow(plan)
        tried.append(Tried(plan, plan.step_s, figures["step_s"]))
    return Measured(ranking, tried, gloo_s, apart_s)


def on_network(network: Network) -> Measured:
    delay = f"{network.delay_ms}ms"
    with (
        tempfile.TemporaryDirectory(prefix="by-plans-") as directory,
        Lab(hosts=network.hosts, rate=f"{network.mbps}mbit", delay=delay) as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.form()
        return measure(Bench(machines, Path(directory)))


def quality(syncs: Sequence[str], seeds: int, batches: int) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of a training, by synchronization mode and seed."""
    results: dict[str, list[dict[str, Any]]] = {sync: [] for sync in syncs}
    with (
        tempfile.TemporaryDirectory(prefix="by-plans-") as directory,
        Lab(hosts=1) as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.launch(0)
        machines.await_answer(0)
        machines.rename(0, "h0")
        bench = Bench(machines, Path(directory))
        for seed, sync in itertools.product(range(seeds), syncs):
            given = {"SYNC": sync, "SEED": str(seed), "BATCHES": str(batches)}
            figures = bench.run("characters.py", "h0", "--per-node", "4", **given)
            results[sync].append(figures)
            print(f"  {sync}, seed {seed}: loss {figures['loss']:.4f}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["networks", "quality"])
    parser.add_argument("--mbps", type=int, help="networks of this rate alone")
    parser.add_argument("--ways", nargs="+", default=[], help="more for quality: PERIOD:CODEC")
    parser.add_argument("--pictures", type=Path, help="a folder for them")
    options = parser.parse_args()
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    print(environment_line())
    figures: dict[str, float] = {}
    chosen = {200: "6:int8", 20: "16:int4"}  # if networks are not measured now
    if options.only != "quality":
        networks = [
            network for network in (QUICK if options.quick else WHOLE) if options.mbps in (None, network.mbps)
        ]
        figures |= measured_networks(networks, chosen, options.pictures)
    if options.only != "networks":
        seeds, batches = (1, CHARACTERS // 2) if options.quick else (3, CHARACTERS)
        syncs = list(dict.fromkeys(["exact", *chosen.values(), *options.ways]))
        results = quality(syncs, seeds, batches)
        gaps = {
            sync: statistics.mean(
                trial["loss"] / exact["loss"] - 1
                for trial, exact in zip(all_of, results["exact"], strict=True)
            )
            for sync, all_of in results.items()
        }
        rows = [
            [sync, statistics.mean(trial["loss"] for trial in results[sync]), gap]
            for sync, gap in gaps.items()
        ]
        print(table(["way", "loss", "over exact"], rows), flush=True)
        figures |= {f"loss_gap_{mbps}mbit": gaps[sync] for mbps, sync in chosen.items()}
        if options.pictures is not None:
            curves = {sync: all_of[0]["curve"] for sync, all_of in results.items()}
            plot.write_curves(options.pictures / "losses.svg", "Training loss by batches, seed 0", curves)
    last_line(figures)
    return 0


def measured_networks(
    networks: Sequence[Network], chosen: dict[int, str], pictures: Path | None
) -> dict[str, float]:
    off, over_best, over_alone, rows = [], [], [], []
    plans_tried = plans = 0
    bars: dict[str, list[plot.Bar]] = {}
    figures: dict[str, float] = {}
    for network in networks:
        ranking, tried, gloo_s, apart_s = on_network(network)
        # Exact steps were followed before anything was known, perhaps by another way: they come first.
        taken = next((trial for trial in tried if trial.plan.name == ranking.chosen.name), tried[0])
        alone = tried[-1]
        off += [trial.off for trial in tried]
        plans_tried, plans = plans_tried + len(tried), plans + len(ranking.plans)
        over_best.append(taken.step_s / min(trial.step_s for trial in tried))
        over_alone.append(taken.step_s / alone.step_s)
        if network.hosts == 4 and network.delay_ms == 0 and network.mbps in chosen:
            figures[f"util_{network.mbps}mbit"] = apart_s / taken.step_s
            chosen[network.mbps] = f"{taken.plan.period}:{taken.plan.codec}"
        for trial in tried:
            mark = "chosen" if trial is taken else ""
            share = apart_s / trial.step_s if len(trial.plan.order) > 1 else None
            rows.append([str(network), trial.plan.name, mark, trial.predicted_s, trial.step_s, share])
        rows.append([str(network), "DDP on Gloo", "", None, gloo_s, apart_s / gloo_s])
        print(table(["network", "plan", "", "predicted s", "measured s", "utilisation"], rows), flush=True)
        bars[str(network)] = [
            *(plot.Bar(trial.plan.name, trial.step_s, trial.predicted_s, trial is taken) for trial in tried),
            plot.Bar("DDP on Gloo", gloo_s),
        ]
        if pictures is not None:
            plot.write_bars(pictures / "plans.svg", "Seconds of a step; the line: as predicted", bars)
    return figures | {
        "prediction_error_median": statistics.median(off),
        "prediction_error_worst": max(off),
        "chosen_over_best": max(over_best),
        "plans_tried": plans_tried,
        "plans_not_tried": plans - plans_tried,
        "over_best_single_host": max(over_alone),
    }


if __name__ == "__main__":
    raise SystemExit(main())
