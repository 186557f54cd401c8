"""Fine-tuning of a Llama that fits on none of three lab hosts, whose memory has a hard limit.

    python -m benchmarks.bigger --quick                 1.1 billion parameters: about 20 minutes
    python -m benchmarks.bigger                         more rounds, and 30 deaths
    python -m benchmarks.bigger --quick --size tiny     whether the benchmark itself works: about 4 minutes

The hosts have 1 Gbit/s, and unequal shares of the processors. All processes of a host, its agent included,
are in control groups. These limit the memory and the time on the processors (version 1 of Linux, as root).
The base is in files that each host reads; page cache, which the kernel can drop, does not count.

- Speed: a run that is split over the hosts, and torch's FSDP2 on the same hosts, in turns. FSDP2 trains the
  same batches with LoRA: `benchmarks.bigger.fsdp2` says how.
- Kills: a run of smaller batches, while hosts die at random moments and come back. Some lose their worker,
  others also their agent.
- Alone: one process without a limit trains the steps of both runs.

The last line is one JSON object of figures; `benchmarks.bigger.page` says what they mean. ``--write`` puts
them into docs/benchmarks/bigger.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.agents.machines import Machines
from benchmarks.bigger import page
from benchmarks.bigger.bench import HOSTS, Bench, SplitRun, alone, say
from benchmarks.bigger.figures import (
    Row,
    Traffic,
    loss_gap,
    prediction_error,
    samples_doubled,
    samples_lost,
    share_of_bound,
    step_seconds,
    summary,
)
from benchmarks.bigger.kills import KilledRun, KilledTraining, planned_faults
from benchmarks.bigger.limits import HeldWatch, Limit, LimitedHost, limited
from benchmarks.bigger.model import SIZES, Size, write_base
from benchmarks.report import environment_line, last_line
from lab import Lab

RATE, BITS_PER_S = "1gbit", 1e9
CORES = (0.85, 0.6, 0.5)  # of two; the network stack of the kernel and this program need the rest
_MB = 1_000_000
_FLOAT = 4
_RIVAL_MORE = 0.15  # of the memory: without it, the kernel sometimes kills FSDP2
_PROGRAMS_BYTES = 600 * _MB  # of the agent and a worker, before it loads weights


class Amount(NamedTuple):
    """Rounds of both ways, the steps of each in a round, and the number of deaths."""

    rounds: int
    steps: int
    rival_steps: int
    kills: int


class Round(NamedTuple):
    """One run of each way, and the end of each of FSDP2's steps with its loss."""

    ours: SplitRun
    rival: list[tuple[float, float]]


class Measured(NamedTuple):
    """All that was measured in the lab."""

    rounds: list[Round]
    killed: KilledRun | None
    peaks: HeldWatch
    rival_peaks: HeldWatch
    oom_kills: int


def main() -> int:
    options = _options()
    amount = Amount(2, 8, 3, 10) if options.quick else Amount(4, 12, 4, 30)
    amount = amount._replace(
        **{name: value for name in Amount._fields if (value := getattr(options, name)) >= 0}
    )
    size = SIZES[options.size]
    environment = environment_line()
    print(environment, flush=True)
    with tempfile.TemporaryDirectory(prefix="by-big-", dir=options.folder) as name:
        directory = Path(name)
        base = directory / "base"
        parameters, weights = write_base(base, size)
        os.sync()  # so that the disk is idle later
        say(f"the model has {parameters / 1e9:.2f} billion parameters in {weights / _MB:.0f} MB")
        measured = measure(base, directory, size, amount, options.seed)
        references = train_alone(base, directory, size, amount, measured.killed)
        figures = figures_of(size, measured, references, weights)
    figures |= {"parameters": parameters, "model_bytes": weights, "environment": environment}
    figures |= {"size": options.size, "seed": options.seed, "rate": RATE, "cores": CORES}
    figures["command"] = " ".join(["python -m benchmarks.bigger", *sys.argv[1:]])
    last_line(figures)
    if options.write:
        page.write(figures)
    return 0


def measure(base: Path, directory: Path, size: Size, amount: Amount, seed: int) -> Measured:
    """Run everything that needs the lab."""
    limits = [Limit(mb * _MB, cores) for mb, cores in zip(size.limits_mb, CORES, strict=True)]
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(hosts=HOSTS, rate=RATE))
        hosts = stack.enter_context(limited(lab.hosts, limits))
        machines = stack.enter_context(Machines(lab.hosts))
        bench = Bench(machines, hosts, size, base, directory)
        machines.form()
        say(f"the cluster of {HOSTS} is formed")
        ours, theirs = HeldWatch(hosts), HeldWatch(hosts)
        rounds = [one_round(bench, number, amount, ours, theirs) for number in range(amount.rounds)]
        killed = None
        if amount.kills:
            killed = KilledTraining(bench).run(planned_faults(amount.kills, seed), ours)
        return Measured(rounds, killed, ours, theirs, sum(host.oom_kills() for host in hosts))


def one_round(bench: Bench, number: int, amount: Amount, ours: HeldWatch, theirs: HeldWatch) -> Round:
    """Train both ways, in an order that alternates."""
    size, runs, rivals = bench.size, [], []
    keep, shares = kept_blocks(size, bench.hosts), shares_of(size.batch, CORES)

    def split() -> None:
        runs.append(bench.split(amount.steps, ours))
        seconds = median(step_seconds(runs[0].workers).values())
        say(f"a step takes {seconds:.2f} s split; held at most {_held(ours)}")

    def fsdp2() -> None:
        with contextlib.ExitStack() as stack:
            for host in bench.hosts:
                stack.enter_context(host.widened(_RIVAL_MORE))
            rivals.append(bench.fsdp2(amount.rival_steps, keep, shares, theirs))
        say(f"a step takes {median(rival_seconds(rivals[0])):.2f} s with FSDP2; held at most {_held(theirs)}")

    for way in (split, fsdp2) if number % 2 == 0 else (fsdp2, split):
        way()
    return Round(runs[0], rivals[0])


def _held(watch: HeldWatch) -> str:
    return ", ".join(f"{peak / _MB:.0f}" for peak in watch.peaks) + " MB"


def kept_blocks(size: Size, hosts: Sequence[LimitedHost]) -> int:
    """Return the blocks that FSDP2 can keep from their forward to their backward pass, by the least memory.

    Beside its shard and the programs, a host holds blocks while they are gathered, copied and computed. Eight
    blocks are left for that: with four, the kernel killed a process for lack of memory.
    """
    heads = size.groups * size.width // size.heads
    block = _FLOAT * size.width * (2 * size.width + 2 * heads + 3 * size.inner)
    ends = _FLOAT * size.words * size.width
    shard = (size.layers * block + 2 * ends) / HOSTS
    free = min(host.limit.memory_bytes for host in hosts) - _PROGRAMS_BYTES - shard - ends - 8 * block
    return max(0, min(size.layers - 1, int(free // block)))


def shares_of(batch: int, cores: Sequence[float]) -> list[int]:
    """Return the samples of a batch for each host, as its share of the processors; one at least."""
    shares = [1] * len(cores)
    while sum(shares) < batch:
        place = max(range(len(cores)), key=lambda place: cores[place] / (shares[place] + 1))
        shares[place] += 1
    return shares


def rival_seconds(steps: Sequence[tuple[float, float]]) -> list[float]:
    """Return the seconds of each step but the first."""
    return [late - early for (_, early), (_, late) in pairwise(steps)]


def train_alone(
    base: Path, directory: Path, size: Size, amount: Amount, killed: KilledRun | None
) -> list[list[Row]]:
    """Return the steps alone, for the batches of both runs, which are trained side by side."""
    wanted = [(size.batch, max(amount.steps, amount.rival_steps) if amount.rounds else 0)]
    wanted += [(size.kill_batch, killed.steps)] if killed is not None else []

    def train(batch: int, steps: int) -> list[Row]:
        marks = directory / f"alone-{batch}"
        marks.mkdir()
        rows = alone(base, size, marks, batch=batch, steps=steps) if steps else []
        say(f"{steps} steps of {batch} samples are trained alone")
        return rows

    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda each: train(*each), wanted))


def figures_of(
    size: Size, measured: Measured, references: Sequence[Sequence[Row]], weights: int
) -> dict[str, Any]:
    """Return the figures of the whole benchmark."""
    expected = [{row.step: row.loss for row in rows} for rows in references]
    traffic = Traffic(_FLOAT * size.length * size.width, BITS_PER_S)
    figures: dict[str, Any] = {
        "peak_memory_over_limit": measured.peaks.over_limit(),
        "model_over_limit": weights / max(size.limits_mb) / _MB,
        "oom_kills": measured.oom_kills,
        "limits_mb": size.limits_mb,
        "peaks_mb": [peak / _MB for peak in measured.peaks.peaks],
        "micro_batches": size.batch,
        "tokens_of_micro_batch": size.length,
    }
    gaps = []
    if measured.rounds:
        runs = [each.ours for each in measured.rounds]
        gaps += [loss_gap(run.workers, expected[0]) for run in runs]
        figures |= speed_figures(measured, size.batch, traffic)
        first = [each.rival[0][0] for each in measured.rounds]
        figures["fsdp2_first_loss_gap"] = max(abs(loss - expected[0][1]) for loss in first)
    if (killed := measured.killed) is not None:
        gaps.append(loss_gap(killed.run.workers, expected[-1]))
        figures |= summary(killed.recoveries) | {
            "kills": len(killed.recoveries),
            "steps_with_kills": killed.steps,
            "micro_batches_with_kills": size.kill_batch,
            "samples_lost": samples_lost(killed.run.workers, killed.steps, size.kill_batch),
            "samples_doubled": samples_doubled(killed.run.workers, size.kill_batch),
            "stage_state_bytes_moved": max(each.stage for each in killed.moved),
            "mirror_state_bytes_moved": max(each.mirror for each in killed.moved),
        }
    return figures | {"loss_gap": max(gaps)}


def speed_figures(measured: Measured, batch: int, traffic: Traffic) -> dict[str, Any]:
    """Return the figures of the rounds."""
    seconds = [median(step_seconds(each.ours.workers).values()) for each in measured.rounds]
    rival = [median(rival_seconds(each.rival)) for each in measured.rounds]
    errors = [prediction_error(each.ours.workers) for each in measured.rounds]
    shares = [share_of_bound(each.ours.workers, batch, traffic) for each in measured.rounds]
    return {
        "over_fsdp2": median(theirs / ours for theirs, ours in zip(rival, seconds, strict=True)),
        "split_step_s": seconds,
        "fsdp2_step_s": rival,
        "fsdp2_peak_over_limit": measured.rival_peaks.over_limit(),
        "share_of_bound": median(shares),
        "prediction_error": None if None in errors else max(each for each in errors if each is not None),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and deaths")
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--seed", type=int, default=1, help="of the deaths")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/benchmarks/bigger.md")
    parser.add_argument("--folder", help="where the weights are written for the time of the run")
    for name in Amount._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=-1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
