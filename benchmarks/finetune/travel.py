"""Time that a base model and a gradient take between two machines, over what the rate of the line allows.

    python -m benchmarks.finetune.travel --quick     each rate once, about 3 minutes
    python -m benchmarks.finetune.travel             each rate three times

`docs/finetune.md` computes such times as bits divided by the rate of the line. Here two lab hosts form a
cluster at each rate, and one `barnraise run --model` trains on both.

- Base: from the start of the run until the other host has the whole model on its disk, verified. Packing on
  the sender happens before.
- Gradient: mean seconds of a step of the run's session, from commit to commit. Every parameter is trained in
  float32, and computing takes next to no time. Each host sends the gradient once, both at the same time.

A line of 10 Gbit/s is not measured: two cores that also encrypt cannot fill it. The last line is one JSON
object of figures by rate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.agents.commits import read_commits
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine, figures_in
from benchmarks.cluster.data_transfer import names_of_runs, seconds_to_arrive
from benchmarks.report import environment_line, last_line
from lab import Lab

SCRIPT = "planned.py"
_MB = 1_000_000
_RUN_S = 600.0


class Line(NamedTuple):
    """A rate, and what is sent at it: about ten seconds of a model, then the gradients of some steps."""

    name: str
    bits_per_s: float
    base: int  # bytes
    gradient: int  # bytes
    steps: int


LINES = (
    Line("20 Mbit/s", 20e6, 20 * _MB, 10 * _MB, 6),
    Line("200 Mbit/s", 200e6, 200 * _MB, 45 * _MB, 10),  # the adapter of a Llama of 1B
    Line("1 Gbit/s", 1e9, 500 * _MB, 45 * _MB, 20),
)


def measure(line: Line, directory: Path, rounds: int) -> tuple[float, float]:
    """Return the median seconds of the base model and of a step, on a new cluster."""
    project = directory / "project"
    project.mkdir(parents=True)
    shutil.copy(REPOSITORY / "benchmarks" / "programs" / SCRIPT, project / SCRIPT)
    with Lab(hosts=2, rate=f"{line.bits_per_s / 1e6:.0f}mbit") as lab, Machines(lab.hosts) as machines:
        machines.form()
        # Agents measure their link once after they have met; that traffic is not a run's.
        machines.until(lambda: machines.are_links_measured(1), 120.0, "the link is measured")
        seconds = [_run(machines, line, project, directory / f"base{number}") for number in range(rounds)]
    base, gradient = zip(*seconds, strict=True)
    return statistics.median(base), statistics.median(gradient)


def _run(machines: Machines, line: Line, project: Path, base: Path) -> tuple[float, float]:
    """Run the script once with a new model in the folder ``base``."""
    base.mkdir()
    with (base / "model.safetensors").open("wb") as file:
        for _ in range(line.base // _MB):
            file.write(os.urandom(_MB))
    trace = base.with_suffix(".trace")
    given = {
        "PARAMETERS": line.gradient // 4,
        "BATCHES": line.steps,
        "BATCH": 2,  # one sample for each host
        "UNIT": 1,
        "SAMPLE_S": 0,
        "OMP_NUM_THREADS": 1,
        "BARNRAISE_TRACE_COMMITS": trace,
    }
    words = [f"--set={name}={value}" for name, value in given.items()]
    known = names_of_runs(machines)
    running = CommandLine(machines).start(0, "run", "--model", f"base={base}", *words, SCRIPT, folder=project)
    arrived = seconds_to_arrive(machines, known, running)
    if running.wait(_RUN_S) != 0:
        raise SystemExit(f"the run failed:\n{running.output()}")
    groups = {commit.generation: commit.world for commit in read_commits(trace)}
    if list(groups.values()) != [2]:
        raise SystemExit(f"a host left the group, so its steps do not count:\n{running.output()}")
    shutil.rmtree(base)
    return arrived, figures_in(running.output())["step_s"]


def figures_of(seconds: Mapping[Line, tuple[float, float]]) -> dict[str, Any]:
    """Return the figures by the name of each line; ``seconds``: of its base model and of its gradient."""
    return {
        "base_over_line": {
            line.name: base * line.bits_per_s / (8 * line.base) for line, (base, _) in seconds.items()
        },
        "gradient_over_line": {
            line.name: step * line.bits_per_s / (8 * line.gradient) for line, (_, step) in seconds.items()
        },
        "base_s": {line.name: base for line, (base, _) in seconds.items()},
        "gradient_s": {line.name: step for line, (_, step) in seconds.items()},
        "base_bytes": {line.name: line.base for line in seconds},
        "gradient_bytes": {line.name: line.gradient for line in seconds},
    }


def rows(figures: Mapping[str, Any]) -> list[str]:
    """Return the figures as the table of `docs/finetune.md`."""
    names = list(figures["base_bytes"])
    lines = [f"| Measured over computed | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for what, key in (("base model", "base"), ("gradient of the adapter", "gradient")):
        cells = [
            f"{figures[f'{key}_over_line'][name]:.2f}: {figures[f'{key}_bytes'][name] / _MB:.0f} MB "
            f"in {figures[f'{key}_s'][name]:.2g} s"
            for name in names
        ]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    environment = environment_line()
    print(environment, flush=True)
    seconds = {}
    with tempfile.TemporaryDirectory(prefix="by-travel-") as directory:
        for number, line in enumerate(LINES):
            seconds[line] = measure(line, Path(directory) / str(number), 1 if options.quick else 3)
            print("{}: base {:.2f} s, step {:.3f} s".format(line.name, *seconds[line]), flush=True)
    figures = figures_of(seconds)
    print("\n".join(rows(figures)))
    last_line({"environment": environment, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
