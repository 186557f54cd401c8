"""Two sites with a slow line between them: what crosses it, and how long a step takes, flat and by sites.

    python -m benchmarks.session.sites --quick     one and two hosts a site, about 3 minutes
    python -m benchmarks.session.sites             one, two and three hosts a site
    ... --codec int8                       sums in that form instead of exact ones

Each site's hosts have 1 Gbit/s; one line of 20 Mbit/s and 20 ms joins the sites. Real machines pair, measure
their links and train; the session finds the sites by itself. Flat is the same with the ring set by name; what
is encoded then goes from each member to each other.
The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

from barnraise.planning import ModelSize, PlanCluster, PlanLimits, StepTimes, make_plans
from barnraise.planning.inputs.codecs import EXACT
from barnraise.training.autotune.tuner import cluster_of_group
from benchmarks.agents.machines import Machines
from benchmarks.plans.__main__ import Bench
from benchmarks.report import environment_line, last_line, table
from lab import Lab

PARAMETERS = 1_000_000
BATCH, BATCHES, SAMPLE_S = 32, 10, 0.005
FEW = 4  # batches of a shorter run: a session's first steps are exact, and its state has to be sent
TRUNK_MBPS, TRUNK_MS = 20, 20


class SiteResult(NamedTuple):
    hosts: int  # a site
    way: str
    predicted_s: float
    step_s: float
    crossing: float  # bytes of a step on the line between the sites, both ways


def predicted(cluster: PlanCluster, way: str, codec: str) -> float:
    model, profile = ModelSize(parameters=PARAMETERS), StepTimes(batch=BATCH, unit=BATCH // 4)
    plans = make_plans(cluster, model, profile, PlanLimits(is_given=True)).plans
    world = len(cluster.members)
    same = [plan for plan in plans if (plan.kind, plan.codec, plan.way) == ("every_step", codec, way)]
    return next(plan.step_s for plan in same if len(plan.order) == world)


def measure(hosts: int, codec: str) -> list[SiteResult]:
    measured = []
    with (
        tempfile.TemporaryDirectory(prefix="by-sites-") as directory,
        Lab(hosts=2 * hosts, rate="1gbit", shaped=True) as lab,
        Machines(lab.hosts) as machines,
    ):
        lab.set_trunk(lab.hosts[:hosts], lab.hosts[hosts:], f"{TRUNK_MBPS}mbit", f"{TRUNK_MS}ms")
        machines.form()
        bench = Bench(machines, Path(directory))
        graph = bench.graph()
        nodes = [facts.node for facts in graph.nodes]
        cluster = cluster_of_group(
            graph, ModelSize(parameters=PARAMETERS), nodes, [1 / SAMPLE_S] * len(nodes)
        )
        all_hosts = ",".join(f"h{host}" for host in range(2 * hosts))

        def run(strategy: str, batches: int) -> tuple[float, int]:
            """Return the seconds of a step, and all bytes on the line between the sites."""
            given = {"PARAMETERS": str(PARAMETERS), "SAMPLE_S": str(SAMPLE_S), "BATCHES": str(batches)}
            given["SYNC"] = EXACT if codec == EXACT else f"1:{codec}"
            before = lab.trunk_bytes()
            figures = bench.run("planned.py", all_hosts, BARNRAISE_COLLECTIVES_STRATEGY=strategy, **given)
            return figures["step_s"], lab.trunk_bytes() - before

        for way, strategy in (("ring", "ring"), ("sites", "auto")) if hosts > 1 else (("ring", "ring"),):
            first, batch_count = (0, BATCHES) if codec == EXACT else (run(strategy, FEW)[1], FEW + BATCHES)
            step_s, crossed = run(strategy, batch_count)
            crossing = (crossed - first) / BATCHES
            measured.append(SiteResult(hosts, way, predicted(cluster, way, codec), step_s, crossing))
            print("  ", measured[-1], flush=True)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--codec", default=EXACT)
    options = parser.parse_args()
    print(environment_line())
    counts = (1, 2) if options.quick else (1, 2, 3)
    results = [result for hosts in counts for result in measure(hosts, options.codec)]
    head = ["hosts a site", "way", "predicted s", "measured s", "MB across a step"]
    rows = [
        [result.hosts, result.way, result.predicted_s, result.step_s, result.crossing / 1e6]
        for result in results
    ]
    print(table(head, rows))
    flat = {result.hosts: result for result in results if result.way == "ring"}
    sites = {result.hosts: result for result in results if result.way == "sites"}
    figures = {}
    for hosts, result in sites.items():
        figures[f"faster_than_flat_{hosts}"] = flat[hosts].step_s / result.step_s
        figures[f"predicted_faster_{hosts}"] = flat[hosts].predicted_s / result.predicted_s
        figures[f"crossing_over_one_host_{hosts}"] = result.crossing / flat[1].crossing
    last_line(figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
