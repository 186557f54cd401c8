"""One fault at a time in a session on four lab hosts: seconds to the next commit, and what is left.

    python -m benchmarks.session.isolated_faults --quick
    python -m benchmarks.session.isolated_faults --only worker,all_machines --times 20

``worker``, ``machine``, ``coordinator``, ``stopped``, ``cut``: each fault hits a group of all four that has
trained undisturbed for some seconds. A unit takes a few milliseconds, so computing lost ones again does not
matter. ``leave``: `barnraise down`. ``all_machines``: all agents and workers at once, at random moments, also
while a checkpoint is written. The run must resume from a checkpoint with the hash that its step had. The last
line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.agents.commits import Commit, judge, last_commits, read_commits
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, write_variables
from benchmarks.report import environment_line, last_line, p95
from benchmarks.session.soak import PROGRAM, UNITS
from lab import Lab

HOSTS = 4
CHECKPOINT_S = 1.0
_SETTLED_S = 2.0
_GOES_ON_S = 60.0
_RETURNS_S = 120.0


class Faults:
    """An endless run on every host, and the faults that hit it."""

    def __init__(self, lab: Lab, machines: Machines, directory: Path, chance: random.Random) -> None:
        self._lab = lab
        self._machines = machines
        self._chance = chance
        self.trace = directory / "trace"
        self._folder = directory / "project"
        self._folder.mkdir()
        shutil.copy(PROGRAM, self._folder / "train.py")
        self.line = CommandLine(machines)
        given = {
            "EPOCHS": "100000",
            "DELAY": "0.01",
            "CHECKPOINT_S": str(CHECKPOINT_S),
            "BARNRAISE_TRACE_COMMITS": str(self.trace),
            "BARNRAISE_LOG": "info",
        }
        write_variables(self._folder, given)
        result = self.line.run(0, "run", "--detach", "--restarts", "1000", "train.py", folder=self._folder)
        self.run = result.stdout.strip()

    def settle(self) -> Commit:
        """Wait until all hosts have trained in one group for some seconds; return the last commit."""

        def is_settled() -> bool:
            recent = [commit for commit in read_commits(self.trace) if commit.at > time.time() - _SETTLED_S]
            return len({commit.generation for commit in recent}) == 1 and recent[0].world == HOSTS

        self._machines.until(is_settled, _RETURNS_S, "all train together")
        time.sleep(self._chance.uniform(0.0, 0.3))
        return last_commits(self.trace, 1)[-1]

    def next_commit(self, begin: float, generation: int, *, in_another: bool = True) -> float:
        """Return the seconds until a commit by a group that was formed after the fault."""
        deadline = time.monotonic() + _GOES_ON_S
        while time.monotonic() < deadline:
            for commit in last_commits(self.trace, 200):
                if commit.at > begin and (commit.generation > generation or not in_another):
                    return commit.at - begin
            time.sleep(0.02)
        raise SystemExit(f"no commit within {_GOES_ON_S:g} s")

    def longest_pause(self, begin: float, seconds: float) -> float:
        time.sleep(seconds)
        times = [commit.at for commit in read_commits(self.trace) if commit.at > begin - 0.5]
        return max(later - earlier for earlier, later in itertools.pairwise(sorted(times)))

    # the faults

    def worker(self) -> float:
        last = self.settle()
        pids = {commit.pid for commit in last_commits(self.trace, HOSTS)}
        begin = time.time()
        os.kill(self._chance.choice(sorted(pids)), signal.SIGKILL)
        return self.next_commit(begin, last.generation)

    def machine(self) -> float:
        self.settle()
        return self._kill(self._chance.choice([host for host in range(HOSTS) if host != self.first()]))

    def coordinator(self) -> float:
        self.settle()
        return self._kill(self.first())

    def stopped(self) -> float:
        """Stop the coordinator's agent; its worker runs on, and may train on with the others.

        Return the longest pause between commits.
        """
        last = self.settle()
        place = self.first()
        begin = time.time()
        self._machines.freeze(place)
        try:
            return self.longest_pause(begin, 8.0)
        finally:
            self._machines.thaw(place)
            assert last.step < last_commits(self.trace, 1)[-1].step

    def cut(self) -> float:
        last = self.settle()
        host, peer = self._chance.sample(self._lab.hosts, 2)
        begin = time.time()
        self._lab.cut(host, peer)
        try:
            return self.next_commit(begin, last.generation)
        finally:
            self._lab.heal(host, peer)

    def leave(self) -> float:
        """Run `barnraise down` on a host and return the longest time without a commit around it."""
        self.settle()
        place = self._chance.choice([host for host in range(1, HOSTS) if host != self.first()])
        begin = time.time()
        assert self.line.run(place, "down", folder=self._folder).returncode == 0
        pause = self.longest_pause(begin, 3.0)
        self._machines.process(place).wait(20)
        self._machines.agents[place] = None
        self._machines.launch(place)
        return pause

    def _kill(self, place: int) -> float:
        last = last_commits(self.trace, 1)[-1]
        begin = time.time()
        self._machines.hosts[place].kill_all()
        self._machines.agents[place] = None
        took = self.next_commit(begin, last.generation)
        self._machines.launch(place)
        return took

    def first(self) -> int:
        """Return the place of the coordinator."""
        status = self._machines.status(self._chance.choice(range(HOSTS)))
        return next(int(row.name[1]) for row in status.nodes if row.coordinator)

    def all_machines(self) -> float:
        """Kill everything and return the seconds of lost training; raise SystemExit if the restored state is
        wrong.
        """
        self.settle()
        time.sleep(self._chance.uniform(0.0, 1.5 * CHECKPOINT_S))
        for place in range(HOSTS):
            self._machines.hosts[place].kill_all()
            self._machines.agents[place] = None
        before = read_commits(self.trace)
        for place in range(HOSTS):
            self._machines.launch(place)
        for place in range(HOSTS):
            self._machines.await_answer(place)
        self._machines.until(
            lambda: len(read_commits(self.trace)) > len(before) + 2 * HOSTS, _RETURNS_S, "it goes on"
        )
        after = read_commits(self.trace)[len(before) :]
        judgement = judge(after, UNITS)
        if judgement.violations:
            raise SystemExit(f"after all workers died: {judgement}")
        first = min(commit.step for commit in after) - 1  # the checkpoint's
        # A step that an earlier death undid has been computed again since, by another group.
        held = {commit.digest for commit in [commit for commit in before if commit.step == first][-1:]}
        saved = self._saved(first)
        if not saved or saved != held:
            raise SystemExit(f"the checkpoint of step {first} has {saved}, its commit had {held}")
        then = max(commit.at for commit in before if commit.step == first)
        return max(commit.at for commit in before) - then

    def _saved(self, step: int) -> set[str]:
        digests = set()
        for place in range(HOSTS):
            pattern = f"runs/{self.run}/checkpoints/*{step:08}/manifest.json"
            for manifest in self._machines.state(place).glob(pattern):
                word = re.search(r'"digest":"([0-9a-f]+)"', manifest.read_text())
                digests.add(word.group(1) if word else "")
        return digests


KINDS: dict[str, tuple[Callable[[Faults], float], int]] = {
    "worker": (Faults.worker, 10),
    "machine": (Faults.machine, 4),
    "coordinator": (Faults.coordinator, 4),
    "stopped": (Faults.stopped, 4),
    "cut": (Faults.cut, 4),
    "leave": (Faults.leave, 4),
    "all_machines": (Faults.all_machines, 5),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--times", type=int, help="how often each")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    print(environment_line())
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="by-iso-") as directory,
        Lab(hosts=HOSTS) as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.form()
        faults = Faults(lab, machines, Path(directory), chance)
        for name in options.only.split(","):
            fault, quick = KINDS[name]
            times = options.times or (quick if options.quick else 4 * quick)
            took = sorted(fault(faults) for _ in range(times))
            figures[name] = {
                "times": times,
                "median_s": round(statistics.median(took), 3),
                "p95_s": p95(took),
                "worst_s": round(took[-1], 3),
            }
            print(f"{name}: {figures[name]}", flush=True)
        commits = read_commits(faults.trace)
        if "all_machines" not in options.only:
            judgement = judge(commits, UNITS)
            figures["violations"] = judgement.violations
            figures["steps"], figures["steps_not_judged"] = judgement.steps, judgement.steps_not_judged
        last_line(figures)
    return 1 if figures.get("violations") else 0


if __name__ == "__main__":
    sys.exit(main())
