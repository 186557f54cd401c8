"""Session on five lab hosts under faults: every 0.5 to 2 s a process dies, stops, is cut off or returns.

    python -m benchmarks.session.soak --quick          10 minutes
    python -m benchmarks.session.soak --minutes 480    the long form
    python -m benchmarks.session.soak --quick --period 5 --codec int8    the same with rounds of local steps
    python -m benchmarks.session.soak --only kill_worker --faults 1000   only this fault, 1000 times

After every commit each member records the hash of its whole state and the units it computed; at the end all
records are compared. Lost samples are counted in steps that every member of one group recorded;
``steps_not_judged`` counts the other steps. After a killed worker the time to the next commit of a new group
is measured. Other faults may leave the group as it is, so the longest pause between two commits is measured.
The last line is one JSON object of figures. All counts of violations must be zero; null means not measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from barnraise.core.errors import BarnraiseError
from benchmarks.agents.commits import judge, last_commits, read_commits
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine
from benchmarks.report import at_most, environment_line, last_line, median, p95
from lab import Lab

HOSTS = 5
UNITS = 8
PROGRAM = REPOSITORY / "tests" / "lab" / "session_program.py"
_GOES_ON_S = 60.0
_MIN_MEMBERS = 3
KINDS = ("kill_worker",) * 2 + ("kill_agent", "kill_coordinator", "stop_coordinator", "cut", "cut_one_way")
GOALS_S = {"kill_to_commit_s_p95": 2.0, "coordinator_pause_s_p95": 5.0}
_NOTICED_S = 6.0  # a fault that has changed no group after so long changes none


class Soak:
    """One run, and the faults that are injected into it."""

    def __init__(
        self, lab: Lab, machines: Machines, directory: Path, seed: int, kinds: Sequence[str]
    ) -> None:
        self._lab = lab
        self._kinds = kinds
        self._machines = machines
        self._trace = directory / "trace"
        self._chance = random.Random(seed)
        self._cuts: list[tuple[int, int]] = []
        self._stopped: list[int] = []
        self.faults: dict[str, int] = {}
        self.next_commit_s: list[float] = []  # after a killed worker
        self.pauses_s: dict[str, list[float]] = {}  # the longest after each other fault

    def start(self, directory: Path, period: int, codec: str) -> None:
        folder = directory / "project"
        folder.mkdir()
        shutil.copy(PROGRAM, folder / "train.py")
        given = {
            "EPOCHS": "100000",
            "DELAY": "0.01",
            "BARNRAISE_TRACE_COMMITS": str(self._trace),
            "BARNRAISE_LOG": "info",
            "MODEL": "images" if period == 1 else "words",  # with batch norms rounds do not overlap
            "PERIOD": str(period),
            "CODEC": codec,
        }
        words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
        CommandLine(self._machines).run(
            0, "run", "--detach", "--restarts", "1000", *words, "train.py", folder=folder
        )
        self._machines.until(lambda: len(read_commits(self._trace)) > 20, 120.0, "training has begun")

    def one_fault(self) -> None:
        fault = getattr(self, self._chance.choice(self._kinds))
        self._await_members()
        before = last_commits(self._trace, 1)[-1]
        begin = time.time()
        if not fault():
            return
        name = fault.__name__
        self.faults[name] = self.faults.get(name, 0) + 1
        self._await_commit(name, begin, before.generation)
        self._restore()

    def _await_members(self) -> None:
        """Wait until at least three members train: with fewer, the next kill could destroy the last copy of
        the state.
        """
        deadline = time.monotonic() + _GOES_ON_S
        while time.monotonic() < deadline:
            last = last_commits(self._trace, 1)[-1]
            if last.world >= _MIN_MEMBERS and time.time() - last.at < 1.0:
                return
            time.sleep(0.05)
        self._explain()
        raise SystemExit(f"fewer than {_MIN_MEMBERS} members trained for {_GOES_ON_S:g} s")

    def kill_worker(self) -> bool:
        members = {commit.pid for commit in last_commits(self._trace, HOSTS * 2)}
        alive = [pid for pid in members if psutil.pid_exists(pid)]
        if len(alive) < 2:
            return False
        os.kill(self._chance.choice(alive), signal.SIGKILL)
        return True

    def kill_agent(self) -> bool:
        return self._kill(self._chance.choice(self._others()))

    def kill_coordinator(self) -> bool:
        place = self._coordinator()
        return place is not None and self._kill(place)

    def stop_coordinator(self) -> bool:
        place = self._coordinator()
        if place is None:
            return False
        self._machines.freeze(place)
        self._stopped.append(place)
        return True

    def cut(self) -> bool:
        host, peer = self._chance.sample(range(HOSTS), 2)
        self._lab.cut(self._lab.hosts[host], self._lab.hosts[peer])
        self._cuts.append((host, peer))
        return True

    def cut_one_way(self) -> bool:
        host, peer = self._chance.sample(range(HOSTS), 2)
        self._lab.cut_one_way(self._lab.hosts[host], self._lab.hosts[peer])
        self._cuts.append((host, peer))
        return True

    def _kill(self, place: int) -> bool:
        self._machines.hosts[place].kill_all()
        self._machines.agents[place] = None
        return True

    def _others(self) -> list[int]:
        return [place for place in range(HOSTS) if self._machines.agents[place] is not None]

    def _coordinator(self) -> int | None:
        for place in self._others():
            try:
                status = self._machines.status(place)
            except BarnraiseError:
                continue
            first = next((row.name for row in status.nodes if row.coordinator), None)
            if first is not None:
                coordinator = int(first[1])
                return coordinator if self._machines.agents[coordinator] is not None else None
        return None

    def _await_commit(self, name: str, begin: float, generation: int) -> None:
        """Wait for a commit by a group formed after the fault, or note the longest pause without one."""
        deadline = time.monotonic() + _GOES_ON_S
        while time.monotonic() < deadline:
            recent = [commit for commit in last_commits(self._trace, HOSTS * 200) if commit.at > begin]
            newer = [commit for commit in recent if commit.generation > generation]
            if newer and name == "kill_worker":
                self.next_commit_s.append(newer[0].at - begin)
                return
            if newer or (recent and recent[-1].at > begin + _NOTICED_S):
                times = sorted({begin, *(commit.at for commit in recent)})
                pause = max(late - early for early, late in itertools.pairwise(times))
                self.pauses_s.setdefault(name, []).append(pause)
                return
            time.sleep(0.02)
        self._explain()
        raise SystemExit(f"no commit within {_GOES_ON_S:g} s after {name}")

    def _explain(self) -> None:
        """Print the last log lines of every agent and worker, to explain a failure."""
        for place in range(HOSTS):
            print(f"== h{place}", *self._machines.agent_log(place).splitlines()[-25:], sep="\n")
            logs = sorted(
                self._machines.state(place).glob("runs/*/logs/*"), key=lambda path: path.stat().st_mtime
            )
            for path in logs[-2:]:
                print(f"-- {path.name}", *path.read_text(errors="replace").splitlines()[-15:], sep="\n")

    def _restore(self) -> None:
        time.sleep(self._chance.uniform(0.5, 2.0))
        for place in self._stopped:
            self._machines.thaw(place)
        self._stopped.clear()
        for host, peer in self._cuts:
            self._lab.heal(self._lab.hosts[host], self._lab.hosts[peer])
        self._cuts.clear()
        for place in range(HOSTS):
            if self._machines.agents[place] is None:
                self._machines.launch(place)

    def figures(self) -> dict[str, Any]:
        commits = read_commits(self._trace)
        judgement = judge(commits, UNITS)
        times = sorted(commit.at for commit in commits)
        gaps = [late - early for early, late in itertools.pairwise(times)]
        coordinators = self.pauses_s.get("kill_coordinator", []) + self.pauses_s.get("stop_coordinator", [])
        return {
            "faults": sum(self.faults.values()),
            "faults_by_kind": self.faults,
            "commits": judgement.steps,
            "steps_not_judged": judgement.steps_not_judged,
            "hash_violations": judgement.hash_violations,
            "step_regressions": judgement.step_regressions + judgement.steps_missing,
            "samples_lost": judgement.units_lost,
            "samples_doubled": judgement.units_doubled,
            "kill_to_commit_s_median": median(self.next_commit_s),
            "kill_to_commit_s_p95": p95(self.next_commit_s),
            "coordinator_pause_s_p95": p95(coordinators),
            "longest_pause_s": max(gaps, default=None),
        }


def _print_times(name: str, values: Sequence[float], what: str) -> None:
    if values:
        print(f"{name}: {len(values)} times, {what} {statistics.median(values):.2f} s (median)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--period", type=int, default=1, help="steps of a round")
    parser.add_argument("--codec", default="exact")
    parser.add_argument("--only", choices=sorted(set(KINDS)), nargs="+", default=KINDS)
    parser.add_argument("--faults", type=int, default=10**9, help="ends after so many")
    options = parser.parse_args()
    minutes = options.minutes or (10.0 if options.quick else 480.0)
    print(environment_line())
    with (
        tempfile.TemporaryDirectory(prefix="by-soak-") as directory,
        Lab(hosts=HOSTS) as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.form()
        soak = Soak(lab, machines, Path(directory), options.seed, options.only)
        soak.start(Path(directory), options.period, options.codec)
        end = time.monotonic() + minutes * 60
        try:
            while time.monotonic() < end and sum(soak.faults.values()) < options.faults:
                soak.one_fault()
        finally:
            figures = soak.figures()
            _print_times("kill_worker", soak.next_commit_s, "next commit after")
            for name, values in soak.pauses_s.items():
                _print_times(name, values, "longest pause")
            print(f"lost samples: {figures['steps_not_judged']} of {figures['commits']} steps not judged")
            for name, goal in GOALS_S.items():
                print(f"{name} <= {goal:g}: {at_most(figures[name], goal)}")
            last_line(figures)
    wrong = ("hash_violations", "step_regressions", "samples_lost", "samples_doubled")
    return 1 if any(figures[name] for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
