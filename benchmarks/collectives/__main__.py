"""Our collectives against Gloo's, in one run: ``python -m benchmarks.collectives [--quick]`` (root).

Both engines live in the same processes and take turns, operation by operation, so that other load on the
machine hits both. Ours is encrypted unless the figure's name says plain; Gloo never is. Without ``--quick``
there are more rounds, and a sweep over sizes, hosts, rates, delays and strategies follows (see
``benchmarks.collectives.sweep``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report
from benchmarks.collectives import sweep
from benchmarks.ranks.hosts import prepare_driver
from benchmarks.ranks.rank_groups import RankSet, contenders, lab_fleet, loopback_rank_set
from benchmarks.report import Spread, durations

MB = 1_000_000
ENGINES = ("barnraise", "gloo")


@dataclass(frozen=True)
class Effort:
    """Number of repetitions of each measurement."""

    big: int
    blocks: int
    issued_small: int
    issued_big: int
    steps: int
    loopback: int


QUICK = Effort(big=25, blocks=60, issued_small=150, issued_big=15, steps=13, loopback=41)
FULL = Effort(big=41, blocks=200, issued_small=500, issued_big=41, steps=41, loopback=101)


@dataclass
class Results:
    """Rows for the reader and figures for the last line."""

    rows: list[Sequence[object]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    wrong: int = 0

    def speed(self, key: str, what: str, rank_set: RankSet, answers: Sequence[Any], prefix: str = "") -> None:
        """Add a row with Gloo's time divided by ours: more than 1 means that ours is faster."""
        self._add(key, what, [prefix + name for name in rank_set.names], answers, "ms", speed=True)

    def cost(self, key: str, what: str, rank_set: RankSet, answers: Sequence[Any], unit: str = "ms") -> None:
        """Add a row with our time divided by Gloo's: less than 1 means that ours is faster."""
        self._add(key, what, rank_set.names, answers, unit, speed=False)

    def _add(
        self, key: str, what: str, names: Sequence[str], answers: Sequence[Any], unit: str, *, speed: bool
    ) -> None:
        def ratio(ours: float, theirs: float) -> float:
            return theirs / ours if speed else ours / theirs

        ours, theirs = (durations(answers, name) for name in names)
        middle, pairs = Spread.of(ours), [ratio(a, b) for a, b in zip(ours, theirs, strict=True)]
        figure = ratio(middle.median, Spread.of(theirs).median)
        scale = {"ms": 1e3, "us": 1e6}[unit]
        cpu = [cpu_seconds(answers, name) for name in names]
        times = [f"{spread.text(scale)} {unit}" for spread in (middle, Spread.of(theirs))]
        self.rows.append((f"{key}: {what}", *times, f"{figure:.3f}", *(f"{value:.3f}" for value in cpu)))
        self.figures |= {key: figure, f"{key}_iqr": [Spread.of(pairs).low, Spread.of(pairs).high]}
        if any(cpu):
            self.figures[f"{key}_cpu_s"] = cpu
        self.wrong += sum(answer["wrong"] for answer in answers)


def cpu_seconds(answers: Sequence[Any], name: str) -> float:
    """Return the median CPU seconds of one operation, over all ranks and their communication processes."""
    ranks = [answer["times"][name] for answer in answers]
    each = [sum(times[-1] for times in operation) / 1e9 for operation in zip(*ranks, strict=True)]
    return Spread.of(each).median


def on_the_lab(results: Results, engines: Sequence[str], effort: Effort) -> None:
    """Run all measurements between hosts at 1 Gbit/s."""
    with lab_fleet(hosts=4, rate="1gbit", ours="barnraise" in engines) as (_, fleet):
        four = RankSet.gather(fleet, [0, 1, 2, 3], contenders(engines), sizes=(2, 4))
        two = four.part(2)
        answers = two.ask("all_reduce", size=32 * MB, rounds=effort.big)
        results.speed("lab_1gbit_2h_tls", "all-reduce 32 MB, 2 hosts", two, answers)
        answers = four.ask("all_reduce", size=32 * MB, rounds=effort.big)
        results.speed("lab_1gbit_4h_tls", "all-reduce 32 MB, 4 hosts", four, answers)
        answers = two.ask("latency", size=4096, blocks=effort.blocks, operations=25)
        results.cost("lab_4k_latency_tls", "all-reduce 4 KiB, 2 hosts", two, answers, "us")
        busy(results, two, effort)
        for key, how in (("ddp_step_1gbit", "ddp"), ("fsdp2_step_1gbit", "fsdp2")):
            answers = two.ask("train", how=how, layers=10, width=1024, steps=effort.steps)
            results.cost(key, f"{how} step, 42 MB of gradients, 2 hosts", two, answers)


def busy(results: Results, rank_set: RankSet, effort: Effort) -> None:
    """Repeat the measurements with each rank's main thread spinning in pure Python."""
    ours, modes = rank_set.names[0], ("busy", "idle")
    small = rank_set.ask_some([ours], "issued", size=4096, rounds=effort.issued_small, modes=modes)
    finished = {mode: Spread.of(durations(small, f"{mode} {ours}")) for mode in modes}
    seen = {mode: Spread.of(durations(small, f"{mode} {ours}", end=2)) for mode in modes}
    for what, spreads in (("busy_4k_latency_tls: 4 KiB, last byte", finished), ("  seen by Python", seen)):
        times = [f"{spreads[mode].text(1e6, 0)} us" for mode in modes]
        cpu = [f"{cpu_seconds(small, f'{mode} {ours}'):.4f}" for mode in modes]
        ratio = spreads["busy"].median / spreads["idle"].median
        results.rows.append((f"{what}, ours busy | ours idle", *times, f"{ratio:.3f}", *cpu))
    middle = finished["idle"].median
    results.figures["busy_4k_latency_tls"] = finished["busy"].median / middle
    results.figures["busy_4k_latency_tls_iqr"] = [
        finished["busy"].low / middle,
        finished["busy"].high / middle,
    ]
    for mode in modes:
        results.figures[f"{mode}_4k_finished_us"] = finished[mode].median * 1e6
        results.figures[f"{mode}_4k_seen_us"] = seen[mode].median * 1e6
    results.wrong += sum(answer["wrong"] for answer in small)
    big = rank_set.ask("issued", size=32 * MB, rounds=effort.issued_big, modes=["busy"])
    results.speed(
        "busy_1gbit_2h_tls", "all-reduce 32 MB, 2 hosts, trainers busy", rank_set, big, prefix="busy "
    )
    late = zip(durations(big, f"busy {ours}", end=2), durations(big, f"busy {ours}"), strict=True)
    results.figures["busy_1gbit_2h_seen_after_ms"] = Spread.of([a - b for a, b in late]).median * 1e3


def on_loopback(results: Results, engines: Sequence[str], effort: Effort) -> None:
    """Run two ranks on one host, where only the processor limits the speed."""
    for key, encryption in (("loopback_plain", "plaintext"), ("loopback_tls", "tls")):
        with loopback_rank_set(engines, encryption) as rank_set:
            answers = rank_set.ask("all_reduce", size=64 * MB, rounds=effort.loopback)
            results.speed(key, f"all-reduce 64 MB, 2 ranks, ours {encryption}", rank_set, answers)


def show(results: Results, engines: Sequence[str]) -> None:
    head = ["", f"{engines[0]} (median, quartiles)", engines[1], "ratio", "cpu s/op", "theirs"]
    print(report.table(head, results.rows))
    print(
        "\nratio: our speed over Gloo's, except latency and step, which are our time over Gloo's; "
        "busy_4k is busy over idle.\nAn operation lasts from the last rank's call to the last rank's end."
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about three minutes, without the sweep")
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help="ours,theirs (gloo,gloo tests the driver)"
    )
    parser.add_argument("--only", choices=("lab", "loopback", "sweep"), help="one part instead of all")
    sweep.add_arguments(parser)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> Mapping[str, Any]:
    options = arguments(given)
    engines = options.engines.split(",")
    effort = QUICK if options.quick else FULL
    prepare_driver()
    print(report.environment_line(), flush=True)
    results, start = Results(), time.monotonic()
    parts = [options.only] if options.only else ["lab", "loopback", *([] if options.quick else ["sweep"])]
    if "lab" in parts:
        on_the_lab(results, engines, effort)
    if "loopback" in parts:
        on_loopback(results, engines, effort)
    if results.rows:
        show(results, engines)
    if "sweep" in parts:
        results.figures |= sweep.run(engines, options)
    results.figures |= {"wrong_results": results.wrong, "seconds": time.monotonic() - start}
    report.last_line(results.figures)
    return results.figures


if __name__ == "__main__":
    main()
