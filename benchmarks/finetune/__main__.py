"""Bytes, steps and memory of fine-tuning a large frozen model on unequal machines, under kills.

    python -m benchmarks.finetune --quick     about 7 minutes
    python -m benchmarks.finetune             more steps and rounds

Three lab hosts at 1 Gbit/s fine-tune a Llama-shaped model in float32: more than 1 GB is frozen, and about
10 MB are trained. The hosts wait 1, 1.5 and 3 times as long for each sample, which simulates slower devices.

- Alone: a loop of torch without Barnraise trains on this machine.
- Kills: the workers of two hosts are killed in turn, and return, while a session trains.
- Steps: a session, and Accelerate with DDP on Gloo (torchrun, in the clear), in turns and without kills.

The last line is one JSON object of figures:

- ``checkpoint_over_trained``: bytes of the largest checkpoint on a disk, over the trained bytes. These are
  the bytes of the trained parameters and of the tensors that their optimizer keeps.
- ``heal_over_trained``: bytes that a host's network card received until a worker that returned had the state,
  over the trained bytes.
- ``loss_gap``: largest difference of a step's loss from the same step alone.
- ``peak_memory_over_single``: peak of a host's worker, with what the processes that it has started have for
  themselves, over the peak alone. What they share with the worker counts once.
- ``step_over_accelerate``: median over the rounds of a session's median step over Accelerate's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil

from benchmarks.agents.commits import Judgement, judge, last_commits, read_commits
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine, figures_in, start_torchrun, worker_pids
from benchmarks.report import Spread, environment_line, last_line, table
from lab import Host, Lab, LabProcess

HOSTS = 3
RATE = "1gbit"
BATCH, UNIT = 6, 1
SLOWNESS = (1.0, 1.5, 3.0)
SAMPLE_S = 0.4
VICTIMS = (2, 1)  # in turns; the first worker has the losses of all steps
KILL_AFTER_S = 1.5  # in a step of 3 s or more
SCRIPT = "finetune.py"
_RUN_S = 1800.0
_BACK_S = 200.0
_MEMORY_EVERY_S = 0.2


class Amount(NamedTuple):
    """Numbers of steps and rounds that are measured."""

    steps: int  # timed ones, of which the first few do not count
    steps_with_kills: int
    rounds: int


class MemoryWatch:
    """Peak memory of process trees by place, read by a thread."""

    def __init__(self, roots: Sequence[Callable[[], list[int]]]) -> None:
        self._roots = roots
        self.peaks = [0] * len(roots)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_MEMORY_EVERY_S):
            for place, roots in enumerate(self._roots):
                self.peaks[place] = max(self.peaks[place], memory_of(roots()))


class Killed(NamedTuple):
    """A session under kills; ``healed``: what each worker that returned has received."""

    figures: dict[str, Any]
    losses: list[float]  # by step
    kills: int
    verdict: Judgement
    healed: list[dict[str, int]]
    checkpoints: list[int]
    peaks: list[int]


class Bench:
    """One formed cluster and its folder."""

    def __init__(self, machines: Machines, directory: Path, amount: Amount) -> None:
        self._machines, self._directory, self._amount = machines, directory, amount
        self._line = CommandLine(machines)
        self._folder = directory / "project"
        self._folder.mkdir()
        shutil.copy(REPOSITORY / "benchmarks" / "programs" / SCRIPT, self._folder / SCRIPT)

    def alone(self) -> tuple[list[float], int]:
        """Return the losses of the loop of torch on one host, by step, and its peak memory."""
        host, losses = self._machines.hosts[0], self._directory / "losses-alone"
        steps = str(self._amount.steps_with_kills)
        given = self._machines.environment(0) | self._variables(WAY="plain", STEPS=steps, LOSSES=str(losses))
        given["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # else torch would import parts of Barnraise
        process = host.start([sys.executable, SCRIPT], env=given, cwd=self._folder)
        with MemoryWatch([_workers_of(host)]) as watch:
            _finish(process)
        return step_losses(losses.read_text(), self._amount.steps_with_kills), watch.peaks[0]

    def killed(self) -> Killed:
        """Train while workers are killed and return."""
        trace, hold, losses = (self._directory / name for name in ("trace", "hold", "losses"))
        hold.touch()
        steps = self._amount.steps_with_kills
        words = self._words(
            BARNRAISE_TRACE_COMMITS=str(trace), HOLD=str(hold), LOSSES=str(losses), STEPS=str(steps)
        )
        running = self._line.start(0, "run", *words, SCRIPT, folder=self._folder)
        with MemoryWatch([_workers_of(host) for host in self._machines.hosts]) as watch:
            kills = self._kill(trace, running)
            hold.unlink()
            output = _finish(running)
        return Killed(
            figures_in(output),
            step_losses(losses.read_text(), steps),
            kills,
            judge(read_commits(trace), BATCH // UNIT),
            [json.loads(text) for text in re.findall(r"HEALED (\{.*\})", output)],
            _checkpoint_sizes(self._machines),
            watch.peaks,
        )

    def session_step(self) -> float:
        """Return the median seconds of a step with a session."""
        words = self._words(DELAY=str(SAMPLE_S), STEPS=str(self._amount.steps), CHECKPOINT_S="3600")
        running = self._line.start(0, "run", *words, SCRIPT, folder=self._folder)
        return float(figures_in(_finish(running))["median"])

    def accelerate_step(self) -> float:
        """Return the median seconds of a step with Accelerate, DDP and Gloo."""
        given = self._variables(WAY="accelerate", DELAY=str(SAMPLE_S), STEPS=str(self._amount.steps))
        started = start_torchrun(self._machines, [self._folder] * HOSTS, [SCRIPT], given)
        first, *_ = [_finish(process) for process in started]
        return float(figures_in(first)["median"])

    def _variables(self, **more: str) -> dict[str, str]:
        return {"BATCH": str(BATCH), "UNIT": str(UNIT), "OMP_NUM_THREADS": "1", **more}

    def _words(self, **more: str) -> list[str]:
        given = self._variables(**more).items()
        return ["--all", *(f"--set={name}={value}" for name, value in given)]

    def _kill(self, trace: Path, running: LabProcess) -> int:
        """Kill the workers of the victims, each when all train together again. Return the number of kills."""
        generation = 0
        for number, rank in enumerate(VICTIMS, 1):
            self._wait(trace, generation, running)
            time.sleep(KILL_AFTER_S)
            last = last_commits(trace, HOSTS)
            generation = max(commit.generation for commit in last)
            victim = next(commit.pid for commit in last if commit.rank == rank)
            os.kill(victim, signal.SIGKILL)
            _say(
                f"kill {number}: the worker of rank {rank}, after step {max(commit.step for commit in last)}"
            )
        self._wait(trace, generation, running)
        return len(VICTIMS)

    def _wait(self, trace: Path, generation: int, running: LabProcess) -> None:
        """Wait until all train together in a group after this generation."""
        what = f"all train together after generation {generation}"
        self._machines.until(
            lambda: running.poll() is not None or is_complete(trace, generation), _BACK_S, what
        )
        if running.poll() is not None:
            raise SystemExit(f"the run ended before {what}:\n{running.output()}")


def step_losses(text: str, steps: int) -> list[float]:
    """Return the mean loss of each step. Raise SystemExit if that of a sample is missing.

    A line has the number of a micro-batch's first sample, and its loss. One that was computed again, because
    its worker was killed, has two lines.
    """
    known = {int(number): float(loss) for number, loss in map(str.split, text.splitlines())}
    try:
        return [
            statistics.fmean(known[number] for number in range(step * BATCH, (step + 1) * BATCH, UNIT))
            for step in range(steps)
        ]
    except KeyError as error:
        raise SystemExit(f"the loss of sample {error} is missing") from error


def is_complete(trace: Path, generation: int) -> bool:
    """Tell whether all hosts train together in a group after ``generation``, each with a commit."""
    last = last_commits(trace, HOSTS) if trace.exists() else []
    return (
        {commit.rank for commit in last} == set(range(HOSTS))
        and {commit.world for commit in last} == {HOSTS}
        and min(commit.generation for commit in last) > generation
    )


def memory_of(workers: Sequence[int]) -> int:
    """Return the peaks of workers, with the memory that the processes which they have started do not share.

    Program files and buffers that such a process shares with its worker are in the peak of the worker.
    """
    own = set(workers)
    for pid in workers:
        try:
            own.update(child.pid for child in psutil.Process(pid).children(recursive=True))
        except psutil.Error:  # it has ended
            continue
    return sum(_status_of(pid, "VmHWM" if pid in workers else "RssAnon") for pid in own)


def _status_of(pid: int, name: str) -> int:
    """Return a number of bytes that the kernel knows of a process; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _workers_of(host: Host) -> Callable[[], list[int]]:
    return lambda: worker_pids(host, SCRIPT)


def _checkpoint_sizes(machines: Machines) -> list[int]:
    folders = [
        folder for place in range(HOSTS) for folder in machines.state(place).glob("runs/*/checkpoints/step-*")
    ]
    return [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]


def _finish(process: LabProcess) -> str:
    """Return the output of a process that ends well; raise SystemExit with it if it does not."""
    if process.wait(_RUN_S) != 0:
        raise SystemExit(f"{' '.join(process.argv)} failed:\n{process.output()}")
    return process.output()


def _say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", flush=True)


def figures_of(alone: Sequence[float], peak_alone: int, killed: Killed) -> dict[str, Any]:
    """Return what the run under kills shows. Raise SystemExit if a part of it was not measured."""
    unmeasured = {
        "a worker that was killed did not get the state": len(killed.healed) != killed.kills,
        "there is no checkpoint": not killed.checkpoints,
        "a loss is not a number": not all(map(math.isfinite, (*killed.losses, *alone))),
        "the states of the workers differed": killed.verdict.hash_violations > 0,
    }
    if any(unmeasured.values()):
        raise SystemExit("; ".join(text for text, holds in unmeasured.items() if holds))
    trained = killed.figures["trained"] + killed.figures["moments"]
    return {
        "checkpoint_over_trained": max(killed.checkpoints) / trained,
        "heal_over_trained": max(healed["wire"] for healed in killed.healed) / trained,
        "loss_gap": max(abs(ours - own) for ours, own in zip(killed.losses, alone, strict=True)),
        "kills": killed.kills,
        "samples_lost": UNIT * killed.verdict.units_lost + BATCH * killed.verdict.steps_missing,
        "samples_doubled": UNIT * killed.verdict.units_doubled,
        "peak_memory_over_single": max(killed.peaks) / peak_alone,
        "frozen_bytes": killed.figures["frozen"],
        "trained_bytes": killed.figures["trained"],
        "optimizer_bytes": killed.figures["moments"],
        "steps_with_kills": killed.verdict.steps,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if find_spec("accelerate") is None:
        raise SystemExit("accelerate is missing; run: pip install -e .[dev]")
    amount = Amount(12, 24, 2) if options.quick else Amount(40, 60, 5)
    print(environment_line(), flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="by-tune-") as directory,
        Lab(hosts=HOSTS, rate=RATE) as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.own = [{"SLOWNESS": str(slowness)} for slowness in SLOWNESS]
        bench = Bench(machines, Path(directory), amount)
        alone, peak_alone = bench.alone()
        _say(f"alone: {peak_alone / 1e6:.0f} MB, losses {alone[0]:.4f} to {alone[-1]:.4f}")
        machines.form()
        _say(f"the cluster of {HOSTS} is formed")
        killed = bench.killed()
        peaks = ", ".join(f"{peak / 1e6:.0f} MB" for peak in killed.peaks)
        _say(f"under kills: {peaks}; {killed.verdict}; {killed.healed}; checkpoints {killed.checkpoints}")
        figures = figures_of(alone, peak_alone, killed)
        pairs = []
        for number in range(amount.rounds):
            ways = [bench.session_step, bench.accelerate_step]
            medians = {way: way() for way in (ways if number % 2 == 0 else ways[::-1])}
            pairs.append((medians[ways[0]], medians[ways[1]]))
            _say("a step takes {:.2f} s with a session, {:.2f} s with Accelerate".format(*pairs[-1]))
    ratios = Spread.of([ours / theirs for ours, theirs in pairs])
    rows = [[number, *pair] for number, pair in enumerate(pairs, 1)]
    print(table(["seconds of a step in round", "session", "Accelerate"], rows))
    last_line(
        figures
        | {
            "step_over_accelerate": ratios.median,
            "hosts": HOSTS,
            "rate": RATE,
            "slowness": SLOWNESS,
            "batch": BATCH,
            "steps": amount.steps,
            "rounds": amount.rounds,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
