"""Runs of the benchmark in its lab: split over the hosts, with FSDP2 on them, and alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine
from benchmarks.bigger.figures import Call, Row, read_calls, read_rows
from benchmarks.bigger.limits import HeldWatch, LimitedHost
from benchmarks.bigger.model import Size, variables
from lab import LabProcess

SCRIPT = "bigger.py"
HOSTS = 3
RUN_S = 1500.0
_PROGRAMS = REPOSITORY / "benchmarks" / "bigger"
_PORT = "29511"


class SplitRun(NamedTuple):
    """Rows and calls that the workers of a run have written, by host, and the output of the command."""

    workers: list[list[Row]]
    calls: list[list[Call]]
    output: str


class Bench:
    """Hosts with limits and agents, the base of the model, and folders for what the programs write."""

    def __init__(
        self, machines: Machines, hosts: Sequence[LimitedHost], size: Size, base: Path, directory: Path
    ) -> None:
        self.machines, self.hosts, self.size, self.base = machines, hosts, size, base
        self.line = CommandLine(machines)
        machines.own = [{"PLACE": f"h{place}"} for place in range(HOSTS)]
        self.project = directory / "project"
        self.project.mkdir()
        shutil.copy(_PROGRAMS / "program.py", self.project / SCRIPT)
        self._directory = directory
        self._number = 0

    def marks(self, name: str) -> Path:
        """Return a new folder for what the workers of a run write."""
        self._number += 1
        folder = self._directory / f"{self._number}-{name}"
        folder.mkdir()
        return folder

    def words(self, marks: Path, *, batch: int, steps: int) -> list[str]:
        """Return the options of ``barnraise run`` that set the variables of the script."""
        given = variables(self.base, self.size, batch=batch, steps=steps)
        return [f"--set={name}={value}" for name, value in {**given, "MARKS": str(marks)}.items()]

    def read(self, marks: Path, output: str = "") -> SplitRun:
        """Return what the workers of a run have written so far."""
        files = [[marks / f"{name}-h{place}" for place in range(HOSTS)] for name in ("steps", "calls")]
        steps, calls = ([path.read_text() if path.exists() else "" for path in each] for each in files)
        return SplitRun(list(map(read_rows, steps)), list(map(read_calls, calls)), output)

    def split(self, steps: int, watch: HeldWatch) -> SplitRun:
        """Train split over all hosts, to the end."""
        marks = self.marks("split")
        words = self.words(marks, batch=self.size.batch, steps=steps)
        with watch:
            running = self.line.start(
                0, "run", "--all", "--env", "agent", *words, SCRIPT, folder=self.project
            )
            output = finish(running)
        return self.read(marks, output)

    def fsdp2(
        self, steps: int, keep: int, shares: Sequence[int], watch: HeldWatch
    ) -> list[tuple[float, float]]:
        """Train with FSDP2 on all hosts. Return the loss and the time of the end of each step."""
        marks = self.marks("fsdp2")
        given = variables(self.base, self.size, batch=self.size.batch, steps=steps)
        given |= {"MARKS": str(marks), "KEEP": str(keep), "SHARES": ",".join(map(str, shares))}
        given |= {"WORLD_SIZE": str(HOSTS), "MASTER_PORT": _PORT, "GLOO_SOCKET_IFNAME": "eth0"}
        given |= {"MASTER_ADDR": self.machines.hosts[0].address, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        with watch:
            started = [
                host.start(
                    [sys.executable, str(_PROGRAMS / "fsdp2.py")],
                    env=self.machines.environment(place) | given | {"RANK": str(place)},
                )
                for place, host in enumerate(self.machines.hosts)
            ]
            finish_all(started)
        by_rank = [
            [json.loads(line) for line in (marks / f"fsdp2-{rank}").read_text().splitlines()]
            for rank in range(HOSTS)
        ]
        return [
            (first[1], max(row[2] for row in (first, *others)))
            for first, *others in zip(*by_rank, strict=True)
        ]


def alone(base: Path, size: Size, marks: Path, *, batch: int, steps: int) -> list[Row]:
    """Train in one process without a limit and without an agent. Return its steps.

    It has as many threads as the workers have, because a sum in another order has other rounding errors.
    """
    given = variables(base, size, batch=batch, steps=steps) | {"MARKS": str(marks)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
    path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    environment = kept | given | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(_PROGRAMS / "program.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"training alone failed:\n{done.stdout}{done.stderr}")
    return read_rows((marks / "steps-alone").read_text())


def finish(process: LabProcess) -> str:
    """Return the output of a process that ends well; raise SystemExit with it if it does not."""
    if process.wait(RUN_S) != 0:
        raise SystemExit(f"{' '.join(process.argv)} failed:\n{process.output()[-8000:]}")
    return process.output()


def finish_all(processes: Sequence[LabProcess]) -> None:
    """Wait until all have ended; raise SystemExit with the output of the first one that failed."""
    running = list(processes)
    while running:
        time.sleep(0.2)
        ended = [process for process in running if process.poll() is not None]
        running = [process for process in running if process not in ended]
        if any(process.returncode for process in ended):
            for process in running:
                process.kill()
        for process in ended:
            finish(process)


def say(text: str) -> None:
    """Print what happens, with the time."""
    print(f"{time.strftime('%X')} {text}", flush=True)
