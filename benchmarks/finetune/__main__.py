"""Bytes, steps and memory of fine-tuning a large frozen model on unequal machines, under kills.

    python -m benchmarks.finetune --quick     about 10 minutes
    python -m benchmarks.finetune             more steps, and three rounds of timed steps

Three lab hosts at 1 Gbit/s fine-tune a Llama-shaped model: more than 1 GB is frozen, about 10 MB are trained.
They wait 1, 1.5 and 3 times as long for each sample, which simulates slower devices.

- Kills: two workers are killed and return. The losses are compared with those of the same script alone.
- Steps: a session and Accelerate with DDP on Gloo (torchrun, in the clear) in turns, without kills.

Trained bytes are those of the trained parameters with AdamW's two moments. The memory of a host is that of
its worker with the processes that the worker has started. The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agents.commits import judge, last_commits, read_commits
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine, figures_in, start_torchrun, worker_pids
from benchmarks.report import Spread, environment_line, last_line
from lab import Host, Lab

HOSTS = 3
BATCH, UNIT = 24, 2
SIZE = {"BATCH": str(BATCH), "UNIT": str(UNIT)}
KILLS = 2
SCRIPT = "finetune.py"
SLOWNESS = (1.0, 1.5, 3.0)
_BACK_S = 300.0
_MEMORY_EVERY_S = 0.2


class MemoryWatch:
    """Largest memory of a host's workers, measured by a thread."""

    def __init__(self, processes: Iterable[Callable[[], list[int]]]) -> None:
        self._processes = list(processes)
        self.peaks = [0] * len(self._processes)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_MEMORY_EVERY_S):
            for place, pids in enumerate(self._processes):
                self.peaks[place] = max(self.peaks[place], sum(map(_memory, pids())))


class Bench:
    """One formed cluster and its folder."""

    def __init__(self, machines: Machines, directory: Path, steps: int, steps_with_kills: int) -> None:
        self._machines = machines
        self._line = CommandLine(machines)
        self._folder = directory / "project"
        self._folder.mkdir()
        shutil.copy(REPOSITORY / "benchmarks" / "programs" / SCRIPT, self._folder / SCRIPT)
        self._directory = directory
        self._steps, self._steps_with_kills = steps, steps_with_kills

    def alone(self) -> tuple[dict[str, Any], int]:
        """Return the figures of the script on one machine, and its memory."""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "DELAY": "0"}
        words = [sys.executable, SCRIPT]
        environment["STEPS"] = str(self._steps)
        process = subprocess.Popen(
            words,
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with MemoryWatch([lambda: [process.pid]]) as watch:
            output, _ = process.communicate(timeout=1200)
        return figures_in(output), watch.peaks[0]

    def killed(self) -> dict[str, Any]:
        """Return the figures of a session under kills."""
        trace = self._directory / "trace"
        words = self._words(
            BARNRAISE_TRACE_COMMITS=str(trace), DELAY="0.1", STEPS=str(self._steps_with_kills)
        )
        with MemoryWatch([_workers_of(host) for host in self._machines.hosts]) as watch:
            running = self._line.start(0, "run", *words, SCRIPT, folder=self._folder)
            kills = self._kill(trace)
            if running.wait(1200) != 0:
                raise SystemExit(running.output())
        output = running.output()
        figures = figures_in(output)
        verdict = judge(read_commits(trace), BATCH // UNIT)
        print(f"{kills} kills; {verdict}")
        healed = [int(size) for size in re.findall(r"HEALED (\d+)", output)]
        return {
            **figures,
            "kills": kills,
            "peaks": watch.peaks,
            "samples_lost": verdict.units_lost + verdict.steps_missing,
            "samples_doubled": verdict.units_doubled,
            "hash_violations": verdict.hash_violations,
            "healed": healed,
            "checkpoint": max(_checkpoint_sizes(self._machines), default=0),
        }

    def session_step(self) -> float:
        """Return the median seconds of a step with a session."""
        done = self._line.run(
            0, "run", *self._words(CHECKPOINT_S="3600"), SCRIPT, folder=self._folder, timeout=1200
        )
        return float(figures_in(done.stdout + done.stderr)["median"])

    def accelerate_step(self) -> float:
        """Return the median seconds of a step with Accelerate, DDP and Gloo."""
        started = start_torchrun(
            self._machines,
            [self._folder] * HOSTS,
            [SCRIPT],
            {"WAY": "accelerate", "STEPS": str(self._steps), **SIZE},
        )
        for process in started:
            process.wait(1200)
        return float(figures_in(started[0].output())["median"])

    def _words(self, **variables: str) -> list[str]:
        given = {"STEPS": str(self._steps), "OMP_NUM_THREADS": "1", **SIZE, **variables}
        return ["--all", *(word for name, value in given.items() for word in ("--set", f"{name}={value}"))]

    def _kill(self, trace: Path) -> int:
        """Kill the worker of the last rank, then, when it is back, that of another machine."""
        generation = 0
        for number in range(KILLS):
            deadline = time.monotonic() + _BACK_S
            while not _is_complete(trace, generation):
                if time.monotonic() > deadline:
                    return number
                time.sleep(0.2)
            last = last_commits(trace, HOSTS)
            generation = last[-1].generation
            victim = next(commit.pid for commit in last if commit.rank == HOSTS - 1 - number)
            os.kill(victim, signal.SIGKILL)
        return KILLS


def _is_complete(trace: Path, generation: int) -> bool:
    """Tell whether all hosts train together in a newer group, each with a commit."""
    last = last_commits(trace, HOSTS) if trace.exists() else []
    return (
        {commit.rank for commit in last} == set(range(HOSTS))
        and {commit.world for commit in last} == {HOSTS}
        and min(commit.generation for commit in last) > generation
    )


def _workers_of(host: Host) -> Callable[[], list[int]]:
    return lambda: worker_pids(host, SCRIPT)


def _memory(pid: int) -> int:
    """Return the memory of a process with those that it has started; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        return sum(int(each.memory_info().rss) for each in (process, *children))
    except psutil.Error:
        return 0


def _checkpoint_sizes(machines: Machines) -> list[int]:
    folders = [
        folder for place in range(HOSTS) for folder in machines.state(place).glob("runs/*/checkpoints/step-*")
    ]
    return [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    print(environment_line())
    with (
        tempfile.TemporaryDirectory(prefix="by-tune-") as directory,
        Lab(hosts=HOSTS, rate="1gbit") as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.own = [{"SLOWNESS": str(slowness)} for slowness in SLOWNESS]
        machines.form()
        bench = Bench(machines, Path(directory), *((14, 30) if options.quick else (40, 60)))
        single, memory = bench.alone()
        killed = bench.killed()
        ratios = []
        for _ in range(1 if options.quick else 3):
            session_s, accelerate_s = bench.session_step(), bench.accelerate_step()
            print(f"a step takes {session_s:.2f} s with a session, {accelerate_s:.2f} s with Accelerate")
            ratios.append(session_s / accelerate_s)
    trained = 3 * killed["trained"]
    gaps = [abs(ours - theirs) for ours, theirs in zip(killed["losses"], single["losses"], strict=False)]
    last_line(
        {
            "frozen_bytes": killed["frozen"],
            "trained_bytes": killed["trained"],
            "kills": killed["kills"],
            "checkpoint_over_trained": killed["checkpoint"] / trained,
            "heal_over_trained": max(killed["healed"], default=0) / trained,
            "healed": len(killed["healed"]),
            "loss_gap": max(gaps),
            "losses_compared": len(gaps),
            "samples_lost": killed["samples_lost"],
            "samples_doubled": killed["samples_doubled"],
            "hash_violations": killed["hash_violations"],
            "peak_memory_over_single": max(killed["peaks"]) / memory,
            "step_over_accelerate": Spread.of(ratios).median,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
