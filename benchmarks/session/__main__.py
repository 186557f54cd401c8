"""Overhead of a session without failures, its gain on unequal machines, and the recovery of a joining worker.

    python -m benchmarks.session --quick     about 15 minutes
    python -m benchmarks.session             more rounds

Four lab hosts at 1 Gbit/s run the same loop in turns, with a different first contender in each round. The
contenders are a session, DDP on our backend (an unmodified program under `barnraise run`), and DDP on Gloo
(torchrun, in the clear).

- Unequal: the hosts wait 1, 1, 2 and 4 times as long for each sample, which simulates slower devices.
  DDP has equal shares.
- Throttled: all are equally fast, until in the middle of the run they become as unequal as that.
- Healing: a worker is killed, returns and gets 500 MB while the others train steps that simulate device work.

The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.agents.commits import Commit, read_commits
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, figures_in, start_torchrun
from benchmarks.report import Spread, environment_line, last_line, table
from lab import Lab

HOSTS = 4
LINE_BYTES_S = 125e6
PROGRAMS = Path(__file__).parents[1] / "programs"
SLOWNESS = (1, 1, 2, 4)
SAMPLE_S = 0.004
SMALL = {"WIDTH": "64", "LAYERS": "2", "BATCH": "256", "DELAY": str(SAMPLE_S)}
STATE_MB = 500
STEP_S = 2.0
SLOWS_AT = 20


class Bench:
    """One formed cluster and its folder."""

    def __init__(self, machines: Machines, directory: Path) -> None:
        self._machines = machines
        self._line = CommandLine(machines)
        self._folder = directory / "project"
        shutil.copytree(PROGRAMS, self._folder)
        self._directory = directory

    def steps(self, rounds: int) -> dict[str, list[float]]:
        """Take medians of step times, by way, in turns; in each round another way is first."""
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "session": lambda: self._under_barnraise("session", STEPS="24"),
            "ddp ours": lambda: self._under_barnraise("ddp", STEPS="24"),
            "ddp gloo": lambda: self._under_torchrun(STEPS="24"),
        }
        medians: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in rotated(list(ways), number):
                medians[way].append(ways[way]()["median"])
        return medians

    def unequal(self) -> tuple[list[float], float, float]:
        """Return samples per second: of each host alone, of a session on all, and of DDP on all.

        All train in units of four samples, and twelve steps of each are measured.
        """
        solos = []
        for place in range(HOSTS):
            figures = self._under_barnraise(
                "session", on=f"h{place}", UNIT="4", STEPS="15", WARM="2", **SMALL
            )
            solos.append(256 / figures["median"])
        ours = self._under_barnraise("session", UNIT="4", STEPS="21", WARM="8", **SMALL)
        ddp = self._under_barnraise("ddp", STEPS="15", WARM="2", **SMALL)
        return solos, 256 / ours["median"], 256 / ddp["median"]

    def throttled(self) -> list[float]:
        """Return the seconds of each step; some hosts become slower after `SLOWS_AT` of them."""
        words = {"UNIT": "4", "STEPS": str(2 * SLOWS_AT), "WARM": "0", "SLOWS_AT": str(SLOWS_AT)}
        seconds: list[float] = self._under_barnraise("session", **words, **SMALL)["steps"]
        return seconds

    def heal(self) -> tuple[float, float, float]:
        """Return the share of the line, the longest pause in steps, and the seconds until recovery."""
        trace = self._directory / "heal"
        words = ["--set", f"BARNRAISE_TRACE_COMMITS={trace}", "--set", f"STATE_MB={STATE_MB}"]
        words += ["--set", f"STEP_S={STEP_S}", "--on", "h0,h1,h2", "--all"]
        running = self._line.start(0, "run", *words, "heavy.py", folder=self._folder)
        self._machines.until(lambda: _steps(trace) > 4, 180.0, "training has begun")
        killed = time.time()
        os.kill(
            next(commit.pid for commit in reversed(read_commits(trace)) if commit.rank == 2), signal.SIGKILL
        )
        self._machines.until(lambda: "HEALED" in running.output(), 180.0, "the joining worker has the state")
        healed = time.time()
        self._machines.until(lambda: _steps(trace, healed) > 3, 60.0, "they train together")
        line = re.search(r"HEALED (\d+) (\S+) (\d+)", running.output())
        assert line is not None
        running.signal(signal.SIGINT)
        running.wait(180)  # three last checkpoints of 500 MB go to one disk
        commits = [commit for commit in read_commits(trace) if commit.rank == 0]
        normal = statistics.median(_gaps([commit for commit in commits if commit.at < killed]))
        # The death itself costs a step; what counts here is the time of the recovery.
        alone = [commit for commit in commits if commit.at > killed and commit.world == 2]
        joined = [commit for commit in commits if commit.at > killed and commit.world == 3]
        pause = max(_gaps([*alone[1:], *joined[:3]]))
        share = int(line[1]) / float(line[2]) / LINE_BYTES_S
        return share, pause / normal, joined[0].at - killed

    def _under_barnraise(self, way: str, on: str = "h0,h1,h2,h3", **variables: str) -> dict[str, Any]:
        words = [word for name, value in variables.items() for word in ("--set", f"{name}={value}")]
        words += ["--set", f"WAY={way}", "--set", "OMP_NUM_THREADS=1"]
        done = self._line.run(0, "run", "--on", on, *words, "steps.py", folder=self._folder, timeout=300)
        return figures_in(done.stdout + done.stderr)

    def _under_torchrun(self, **variables: str) -> dict[str, Any]:
        started = start_torchrun(
            self._machines, [self._folder] * HOSTS, ["steps.py"], {"WAY": "ddp", **variables}
        )
        for process in started:
            process.wait(200)
        return figures_in(started[0].output())


def rotated(ways: Sequence[str], number: int) -> list[str]:
    """Give the ways in the order of a round: each is first, and last, equally often."""
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]


def _compared(medians: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Compare a session's steps with DDP's, round by round: medians with quartiles."""
    rows = [[way, len(many), min(many), Spread.of(many).text(), max(many)] for way, many in medians.items()]
    print(table(["seconds of a step", "rounds", "least", "median [quartiles]", "most"], rows))
    figures: dict[str, Any] = {}
    for name, way in (("step_over_ddp_ours", "ddp ours"), ("step_over_ddp_gloo", "ddp gloo")):
        ratios = [
            session_s / ddp_s for session_s, ddp_s in zip(medians["session"], medians[way], strict=True)
        ]
        spread = Spread.of(ratios)
        figures[name], figures[f"{name}_quartiles"] = spread.median, [spread.low, spread.high]
    return figures


def _steps(trace: Path, since: float = 0.0) -> int:
    return sum(commit.rank == 0 and commit.at > since for commit in read_commits(trace))


def _gaps(commits: list[Commit]) -> list[float]:
    return [late.at - early.at for early, late in itertools.pairwise(commits)]


def _is_measured(machines: Machines) -> bool:
    """Return True if the agents have finished the measurements of their first minute, which would disturb."""
    devices = all(any(device.tflops for device in row.devices) for row in machines.status(0).nodes)
    return devices and machines.are_links_measured(HOSTS * (HOSTS - 1) // 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["steps", "unequal", "throttled", "heal"])
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    print(environment_line())
    with (
        tempfile.TemporaryDirectory(prefix="by-session-") as directory,
        Lab(hosts=HOSTS, rate="1gbit") as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.own = [{"SLOWNESS": str(slowness)} for slowness in SLOWNESS]
        machines.form()
        machines.until(lambda: _is_measured(machines), 300.0, "the agents have measured what they measure")
        bench = Bench(machines, Path(directory))
        if options.only in (None, "steps"):
            figures |= _compared(bench.steps(5 if options.quick else 9))
        if options.only in (None, "unequal"):
            solos, ours, ddp = bench.unequal()
            print("samples per second alone:", ", ".join(f"{speed:.0f}" for speed in solos))
            print(f"together: {ours:.0f} with a session, {ddp:.0f} with equal shares (DDP)")
            figures["unequal_share_of_solo"] = ours / sum(solos)
            figures["equal_shares_share_of_solo"] = ddp / sum(solos)
        if options.only in (None, "throttled"):
            took = bench.throttled()
            usual, then = statistics.median(took[5:SLOWS_AT]), statistics.median(took[-SLOWS_AT // 2 :])
            after = took[SLOWS_AT:]
            adapted = next(number for number, seconds in enumerate(after) if seconds < 1.15 * then)
            print(f"{usual:.2f} s a step; then {', '.join(f'{seconds:.2f}' for seconds in after)}")
            figures["throttled_steps_to_adapt"] = adapted
            figures["throttled_step_over_ideal"] = then / (
                usual * HOSTS / sum(1 / slowness for slowness in SLOWNESS)
            )
        if options.only in (None, "heal"):
            share, pause, back = bench.heal()
            print(f"{STATE_MB} MB came at {share:.2f} of the line; back after {back:.1f} s")
            figures["heal_share_of_link"] = share
            figures["heal_longest_pause_steps"] = pause
    last_line(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
