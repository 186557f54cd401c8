"""Equality of training on several machines, also under deaths, with training on one machine.

    python -m benchmarks.session.equality --quick    about 6 minutes
    python -m benchmarks.session.equality            every model with every optimizer, 20 kills each

In float64 over 200 steps the same script runs alone, on 2, 3 and 4 lab hosts, and on 4 hosts under kills.
Workers are killed at random moments and return. In float32: one step from the same state. The last line is
one JSON object: the largest difference of a parameter and of a loss, relative to the largest of its kind.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from benchmarks.agents.commits import judge, last_commits, read_commits
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine
from benchmarks.report import environment_line, last_line, table
from lab import Lab

HOSTS = 4
UNITS = 8
PROGRAM = REPOSITORY / "tests" / "lab" / "session_program.py"
CASES = [("images", "sgd"), ("words", "adamw"), ("images", "adamw"), ("words", "sgd")]
_BACK_S = 60.0


class Outcome:
    """Result of a training: its parameters, and its last losses."""

    def __init__(self, final: Path, output: str) -> None:
        self.tensors = load_file(final)
        matches = re.findall(r"losses\b ?(.*)", output)
        self.losses = torch.tensor([float(word) for word in matches[-1].split()], dtype=torch.float64)

    def differs(self, other: Outcome) -> tuple[float, float]:
        """Return the largest difference within a tensor, relative to its largest value; of the losses
        likewise.
        """
        pairs = [
            (value.double(), other.tensors[name].double())
            for name, value in self.tensors.items()
            if value.is_floating_point()
        ]
        apart = max(float((own - peer).abs().max() / own.abs().max()) for own, peer in pairs)
        count = min(len(self.losses), len(other.losses))
        if not count:  # after a single step nothing is logged yet
            return apart, 0.0
        losses = (self.losses[-count:] - other.losses[-count:]).abs().max() / self.losses.abs().max()
        return apart, float(losses)


class Bench:
    """One formed cluster and its folder."""

    def __init__(self, machines: Machines, directory: Path, seed: int) -> None:
        self._machines = machines
        self._line = CommandLine(machines)
        self._directory = directory
        self._serial = 0
        self._chance = random.Random(seed)
        self._folder = directory / "project"
        self._folder.mkdir()
        shutil.copy(PROGRAM, self._folder / "train.py")

    def alone(self, variables: Mapping[str, str]) -> Outcome:
        final = self._next("final")
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "FINAL": str(final), **variables}
        done = subprocess.run(
            [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=True
        )
        return Outcome(final, done.stdout)

    def together(self, hosts: int, variables: Mapping[str, str], kills: int = 0) -> tuple[Outcome, int]:
        """Train on ``hosts`` hosts; return the outcome and the number of kills that happened."""
        final, trace = self._next("final"), self._next("trace")
        given = {**variables, "FINAL": str(final), "BARNRAISE_TRACE_COMMITS": str(trace)}
        words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
        on = ",".join(f"h{place}" for place in range(hosts))
        running = self._line.start(0, "run", "--on", on, *words, "train.py", folder=self._folder)
        done = self._kill(trace, kills, hosts) if kills else 0
        if running.wait(900) != 0:
            raise SystemExit(running.output())
        judgement = judge(read_commits(trace), UNITS)
        if judgement.violations:
            raise SystemExit(f"the trace is wrong: {judgement}")
        return Outcome(final, running.output()), done

    def _kill(self, trace: Path, kills: int, hosts: int) -> int:
        """Kill workers one after the other, each when the previous one is back."""
        self._machines.until(lambda: len(read_commits(trace)) > 2 * hosts, 120.0, "training has begun")
        done, generation = 0, 0
        while done < kills:
            deadline = time.monotonic() + _BACK_S
            last = last_commits(trace, 1)[-1]
            while last.world < hosts or last.generation <= generation:
                if time.monotonic() > deadline:
                    return done  # it has ended
                time.sleep(0.1)
                last = last_commits(trace, 1)[-1]
            time.sleep(self._chance.uniform(0.0, 1.0))
            alive = [commit.pid for commit in last_commits(trace, hosts) if psutil.pid_exists(commit.pid)]
            if not alive:
                return done
            os.kill(self._chance.choice(alive), signal.SIGKILL)
            done, generation = done + 1, last.generation
        return done

    def _next(self, name: str) -> Path:
        self._serial += 1
        return self._directory / f"{name}{self._serial}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["kills"], help="not without kills")
    options = parser.parse_args()
    cases = CASES[:1] if options.quick else CASES
    kills = 6 if options.quick else 20
    rows: list[list[object]] = []
    print(environment_line())
    with (
        tempfile.TemporaryDirectory(prefix="by-equal-") as directory,
        Lab(hosts=HOSTS) as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.form()
        bench = Bench(machines, Path(directory), options.seed)
        for model, optimizer in cases:
            given = {"MODEL": model, "OPTIMIZER": optimizer, "EPOCHS": "20"}
            alone = bench.alone(given)
            for hosts in () if options.only else (2, 3, 4):
                outcome, _ = bench.together(hosts, given)
                rows.append([f"{model}, {optimizer}, {hosts} hosts", 0, *alone.differs(outcome)])
            # Slow enough that the kills, each followed by a return, fall into the 200 steps.
            outcome, done = bench.together(4, {**given, "DELAY": str(0.03 * kills)}, kills)
            rows.append([f"{model}, {optimizer}, 4 hosts", done, *alone.differs(outcome)])
        one_step = {"KIND": "float32", "SAMPLES": "24", "EPOCHS": "1", "OPTIMIZER": "sgd"}
        single = bench.alone(one_step)
        outcome, _ = bench.together(4, one_step)
        (short, _) = single.differs(outcome)
    shown = [[name, kills, f"{parameters:.1e}", f"{losses:.1e}"] for name, kills, parameters, losses in rows]
    print(table(["float64, 200 steps", "kills", "parameters", "losses"], shown))
    print(f"float32, one step from the same state, 4 hosts: {short:.2e}")
    last_line(
        {
            "kills": sum(int(str(row[1])) for row in rows),
            "parameters_differ": max(float(str(row[2])) for row in rows),
            "losses_differ": max(float(str(row[3])) for row in rows),
            "float32_step_differs": short,
        }
    )
    return 0 if max(float(str(row[2])) for row in rows) < 1e-9 else 1


if __name__ == "__main__":
    sys.exit(main())
