"""Hosts that die at random moments while a split model trains, and come back."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.agents.runs import worker_pids
from benchmarks.bigger.bench import HOSTS, SCRIPT, Bench, SplitRun, finish, say
from benchmarks.bigger.figures import (
    Kill,
    MovedState,
    Recovery,
    Row,
    first_commit,
    moved_over_trained,
    recovery_of,
    step_seconds,
)
from benchmarks.bigger.limits import HeldWatch

_WORKER, _HOST = "worker", "host"
_STEPS = 400  # more than are ever trained
_WAIT_S = 120.0
_TAIL = 40


class Fault(NamedTuple):
    """A death on one host. ``share``: its moment in a step, as a share of the step's seconds."""

    kind: str
    place: int
    share: float


class KilledRun(NamedTuple):
    """A run under kills, with what each of them led to."""

    run: SplitRun
    recoveries: list[Recovery]
    moved: list[MovedState]
    steps: int


def planned_faults(count: int, seed: int) -> list[Fault]:
    """Return random faults: two of five kill a whole host, its agent included, and the others its worker."""
    chance = random.Random(seed)
    kinds = [_HOST if number % 5 < 2 else _WORKER for number in range(count)]
    chance.shuffle(kinds)
    places = [number % HOSTS for number in range(count)]
    chance.shuffle(places)
    return [Fault(kind, place, chance.random()) for kind, place in zip(kinds, places, strict=True)]


class KilledTraining:
    """A run that trains until all faults have happened.

    After the first step without a host, the others wait until the worker of that host has started again. So
    the steps stay few; each of them is also trained alone.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench, self._machines = bench, bench.machines
        self.marks = bench.marks("kills")
        self._recoveries: list[Recovery] = []
        self._moved: list[MovedState] = []

    def run(self, faults: Sequence[Fault], watch: HeldWatch) -> KilledRun:
        """Train, kill, and return what happened."""
        bench = self._bench
        words = bench.words(self.marks, batch=bench.size.kill_batch, steps=_STEPS)
        with watch:
            self._start(words)
            for number, fault in enumerate(faults, 1):
                self._settle()
                self._hit(number, fault)
            self._settle()
            last = self._newest() + 3
            (self.marks / "last.new").write_text(str(last))
            (self.marks / "last.new").rename(self.marks / "last")
            output = finish(bench.line.start(0, "attach", "--all", self.name, folder=bench.project))
        return KilledRun(bench.read(self.marks, output), self._recoveries, self._moved, last)

    def _start(self, words: Sequence[str]) -> None:
        options = ("run", "--detach", "--env", "agent", "--restarts", "1000")
        done = self._bench.line.run(0, *options, *words, SCRIPT, folder=self._bench.project)
        if done.returncode != 0:
            raise SystemExit(f"the run did not start:\n{done.stdout}{done.stderr}")
        self.name = done.stdout.strip().splitlines()[-1]

    def _read(self) -> SplitRun:
        return self._bench.read(self.marks)

    def _newest(self) -> int:
        return max((rows[-1].step for rows in self._read().workers if rows), default=0)

    def _settle(self) -> None:
        """Wait until all hosts have committed a step of one group."""

        def is_settled() -> bool:
            last = [rows[-1] for rows in self._read().workers if rows]
            return len(last) == HOSTS and {(row.world, row.generation) for row in last} == {
                (HOSTS, last[0].generation)
            }

        self._until(is_settled, "all hosts train together")

    def _hit(self, number: int, fault: Fault) -> None:
        """Kill, wait for the next commit, and let the host come back."""
        workers = self._read().workers
        steps = list(step_seconds(workers).values())
        typical_s = median(steps) if steps else 1.0
        time.sleep(fault.share * typical_s)
        host = self._machines.hosts[fault.place]
        pids, ready = worker_pids(host, SCRIPT), self._ready()
        kill = Kill(fault.kind, host.name, time.monotonic(), self._newest())
        if fault.kind == _HOST:
            host.kill_all()
            self._machines.agents[fault.place] = None
        else:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        self._until(
            lambda: first_commit(self._survivors(fault.place), kill, HOSTS) is not None, "the others go on"
        )
        (self.marks / "pause").touch()
        commit = first_commit(self._survivors(fault.place), kill, HOSTS)
        assert commit is not None
        run = self._read()
        calls = [call for place, each in enumerate(run.calls) if place != fault.place for call in each]
        self._recoveries.append(recovery_of(kill, commit, calls))
        self._moved.append(moved_over_trained(kill, commit, run.workers, fault.place))
        self._show(number, fault, kill)
        if fault.kind == _HOST:
            self._machines.launch(fault.place)
        self._until(lambda: self._ready() > ready, "the worker has started again")
        (self.marks / "pause").unlink()

    def _survivors(self, dead: int) -> list[list[Row]]:
        return [rows for place, rows in enumerate(self._read().workers) if place != dead]

    def _ready(self) -> int:
        """Return the number of workers that have ever started."""
        path = self.marks / "ready"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def _show(self, number: int, fault: Fault, kill: Kill) -> None:
        newest, moved = self._recoveries[-1], self._moved[-1]
        state = f", state moved {moved.stage:.2f} of what it trained, and {moved.mirror:.2f} for mirrors"
        say(
            f"kill {number}: the {fault.kind} of h{fault.place} after step {kill.step}: next commit after "
            f"{newest.kill_to_commit_s:.1f} s (noticed {newest.detect_s:.1f}, group {newest.regroup_s:.1f}, "
            f"weights {newest.load_s:.1f}, step {newest.step_s:.1f}){state}"
        )

    def _until(self, truth: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not truth():
            if time.monotonic() > deadline:
                raise SystemExit(f"waited {_WAIT_S:g} s until {what}\n" + "\n".join(self._logs()))
            time.sleep(0.1)

    def _logs(self) -> Iterator[str]:
        """Yield the ends of the logs of agents and of their newest workers."""
        for place in range(HOSTS):
            yield f"== h{place}\n" + "\n".join(self._machines.agent_log(place).splitlines()[-_TAIL:])
            logs = self._machines.state(place).glob("runs/*/logs/*")
            for path in sorted(logs, key=lambda path: path.stat().st_mtime)[-1:]:
                yield _end_of(path)


def _end_of(path: Path) -> str:
    return f"-- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL:])
