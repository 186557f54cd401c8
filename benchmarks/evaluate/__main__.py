"""Speed of a map on three unequal machines, against the sum of their own speeds; exactness through kills.

    python -m benchmarks.evaluate --quick     about 3 minutes
    python -m benchmarks.evaluate             more items and kills

Three lab hosts at 1 Gbit/s compute items that wait 1, 1 and 2 times as long, which simulates slower devices.
Then each item computes a small network on random numbers. First each host maps alone, then all together.
Then they map once more while workers are killed; each killed worker is restarted by its machine. The results
of every worker are compared bit by bit with those of ``python mapped.py``, without Barnraise's agents.

- ``share_of_solo``: items per second together, over the sum of the hosts' own, without kills.
- ``share_of_solo_with_kills``: the same with kills. It includes the time in which the machines restart their
  workers, and import torch for that.
- ``differences``: numbers that differ from those of one machine, over all workers and both runs.
- ``computed_again``: items that were computed more than once: a killed worker had not sent them yet.

The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine, figures_in, worker_pids
from benchmarks.report import environment_line, last_line, table
from lab import Host, Lab

HOSTS = 3
SLOWNESS = (1, 1, 2)
ITEM_S = 0.1
VICTIMS = (2, 1)  # in turns; the first host measures the time
PROGRAM = Path(__file__).parents[1] / "programs" / "mapped.py"


class Bench:
    """One formed cluster and its folders."""

    def __init__(self, machines: Machines, directory: Path) -> None:
        self._machines, self._directory = machines, directory
        self._line = CommandLine(machines)
        self._folder = directory / "project"
        self._folder.mkdir()
        shutil.copy(PROGRAM, self._folder / "train.py")

    def alone(self, count: int) -> torch.Tensor:
        """Return the results of the script under plain python."""
        variables = self._variables("alone", count) | {"ITEM_S": "0"}
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), **variables}
        subprocess.run([sys.executable, str(PROGRAM)], env=environment, check=True, timeout=300)
        return load_file(f"{variables['OUT']}-alone")["results"]

    def speed(self, name: str, on: str, count: int, kills: int = 0) -> tuple[float, Counter[int]]:
        """Return the items per second of a run, and how often each item was computed."""
        trace = self._directory / f"{name}.trace"
        words = [f"--set={key}={value}" for key, value in self._variables(name, count).items()]
        running = self._line.start(0, "run", "--on", on, *words, "train.py", folder=self._folder)
        for number in range(kills):
            part = count * (number + 1) // (kills + 1)
            self._kill_when(trace, part, self._machines.hosts[VICTIMS[number % len(VICTIMS)]])
        code = running.wait(600)
        figures = figures_in(running.output())
        if code not in (0, 3):
            raise SystemExit(f"the run failed:\n{running.output()}")
        return count / figures["seconds"], computed(trace)

    def _kill_when(self, trace: Path, part: int, host: Host) -> None:
        """Kill a worker of a host when ``part`` items are computed."""
        self._machines.until(lambda: computed(trace).total() >= part, 300.0, f"{part} items are computed")
        self._machines.until(lambda: bool(worker_pids(host)), 120.0, "the victim has a worker")
        os.kill(worker_pids(host)[0], signal.SIGKILL)

    def differences(self, name: str, expected: torch.Tensor) -> int:
        """Return how many numbers of all workers' results differ from the expected ones, bit by bit."""
        files = sorted(self._directory.glob(f"{name}-h*"))
        assert files, "a run has results"
        results = [load_file(file)["results"] for file in files]
        return sum(int((each.view(torch.int32) != expected.view(torch.int32)).sum()) for each in results)

    def _variables(self, name: str, count: int) -> dict[str, str]:
        directory = self._directory
        return {
            "COUNT": str(count),
            "ITEM_S": str(ITEM_S),
            "OUT": str(directory / name),
            "TRACE": str(directory / f"{name}.trace"),
            "OMP_NUM_THREADS": "1",
        }


def computed(trace: Path) -> Counter[int]:
    """Return how often each item was computed to its end."""
    lines = trace.read_text().splitlines() if trace.exists() else []
    return Counter(int(line.split()[1]) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    solo_items, items, kills = (150, 900, 3) if options.quick else (300, 3000, 9)
    figures: dict[str, Any] = {}
    print(environment_line())
    with (
        tempfile.TemporaryDirectory(prefix="by-evaluate-") as directory,
        Lab(hosts=HOSTS, rate="1gbit") as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.own = [{"SLOWNESS": str(slow), "HOST": f"h{place}"} for place, slow in enumerate(SLOWNESS)]
        machines.form()
        bench = Bench(machines, Path(directory))
        expected = bench.alone(items)
        solos = [
            bench.speed(f"solo{place}", f"h{place}", solo_items // SLOWNESS[place])[0]
            for place in range(HOSTS)
        ]
        everyone = ",".join(f"h{place}" for place in range(HOSTS))
        together, counts = bench.speed("together", everyone, items)
        with_kills, killed_counts = bench.speed("killed", everyone, items, kills)
        rows = [[f"h{place} alone", f"{speed:.2f}"] for place, speed in enumerate(solos)]
        rows += [["together", f"{together:.2f}"], [f"with {kills} kills", f"{with_kills:.2f}"]]
        print(table(["", "items per second"], rows))
        figures = {
            "differences": bench.differences("together", expected) + bench.differences("killed", expected),
            "share_of_solo": together / sum(solos),
            "share_of_solo_with_kills": with_kills / sum(solos),
            "kills": kills,
            "items_lost": 2 * items - len(counts) - len(killed_counts),
            "computed_again": killed_counts.total() - len(killed_counts),
            "computed_again_without_kills": counts.total() - len(counts),
        }
    last_line(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
