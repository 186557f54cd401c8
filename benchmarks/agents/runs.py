"""Runs on real agents in the lab, started and watched as a person does: through the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agents.machines import Machines
from lab import Host, LabProcess

PAIRING_CODE = re.compile(r"barnraise join (\d+(?:-[a-z]+){3})")  # in the output of `pair`
MARK = """\
import os, time
with open(os.path.join(os.environ["MARKS"], "first-" + os.environ["RANK"]), "w") as mark:
    mark.write(repr(time.time()))
"""


class CommandLine:
    """``barnraise ...`` typed on the hosts of a lab."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "barnraise.cli.main", *words]

    def start(self, place: int, *words: str, folder: Path | None = None) -> LabProcess:
        """Start a command in the background; its output is kept."""
        environment = self.machines.environment(place)
        return self.machines.hosts[place].start(self.command(*words), env=environment, cwd=folder)

    def until(self, truth: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait until the condition is true and return the seconds that this took."""
        return self.machines.until(truth, seconds, what)

    def run(
        self, place: int, *words: str, folder: Path | None = None, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command until it exits, with any exit code."""
        environment = self.machines.environment(place)
        return self.machines.hosts[place].run(
            self.command(*words), env=environment, cwd=folder, timeout=timeout, check=False
        )


def worker_pids(host: Host, script: str = "train.py") -> list[int]:
    """Return the processes on a host that run the script of a run."""
    pids = []
    for pid in host.pids():
        try:
            words = psutil.Process(pid).cmdline()
        except psutil.Error:
            continue
        while words and not words[-1]:  # Wine fills the rest of the line with zeros
            words.pop()
        if words[-1:] == [script] and "barnraise.cli.main" not in words:
            pids.append(pid)
    return pids


def figures_in(printed: str) -> dict[str, Any]:
    """Return the figures that a program of `programs` printed."""
    match = re.search(r"FIGURES (\{.*\})", printed)
    if match is None:
        raise SystemExit(f"the program printed no figures:\n{printed}")
    result: dict[str, Any] = json.loads(match[1])
    return result


def write_variables(folder: Path, variables: Mapping[str, str]) -> None:
    """Write the variables of ``session_program.py`` into its folder, where a power cut spares them."""
    (folder / "variables.json").write_text(json.dumps(dict(variables)))


def write_folder(folder: Path, script: str, files: int = 0, extra: Mapping[str, str] | None = None) -> None:
    """Write a working folder: the script, and ``files`` small modules beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(script)
    package = folder / "parts"
    package.mkdir(exist_ok=True)
    for number in range(files):
        (package / f"part_{number:03}.py").write_text(f"# a module of the user's\nNUMBER = {number}\n" * 20)
    for name, content in (extra or {}).items():
        (folder / name).write_text(content)


def first_lines(marks: Path, count: int, deadline_s: float) -> list[float]:
    """Return the wall-clock time at which each of ``count`` workers reached its script's first line."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            return [float((marks / f"first-{rank}").read_text()) for rank in range(count)]
        except (FileNotFoundError, ValueError):
            if time.monotonic() > end:
                names = sorted(path.name for path in marks.iterdir())
                raise AssertionError(f"only {names} began within {deadline_s:g} s") from None
            time.sleep(0.02)


def start_torchrun(
    machines: Machines,
    folders: Sequence[Path],
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
) -> list[LabProcess]:
    """Start the same program under torchrun with Gloo between the hosts, with one folder for each host."""
    first = machines.hosts[0].address
    started = []
    for place, folder in enumerate(folders):
        host = machines.hosts[place]
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(folders))]
        words += ["--node-rank", str(place), "--nproc-per-node", "1", "--local-addr", host.address]
        words += ["--master-addr", first, "--master-port", "29511", *command]
        environment = {
            **machines.environment(place),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",  # all hosts of the lab have one name, which leads nowhere
            **(variables or {}),
        }
        started.append(host.start(words, env=environment, cwd=folder))
    return started
