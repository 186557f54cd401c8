"""Honest work during an attack: a run of two owners, and a person that keeps asking for the status."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from barnraise.agent_client.run_requests import RunRow, WatchRequest, WatchResponse
from barnraise.core.errors import BarnraiseError
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, write_folder
from benchmarks.attacks.registry import undisturbed

_RANKS = range(2)
_ASK_S = 0.5
_SLOWEST_S = 15.0  # an answer or a step; two cores carry all hosts and the attacker
_SCRIPT = """\
import os, time
place = os.path.join(os.environ["MARKS"], os.environ["RANK"])
with open(place + "-pids", "a") as pids:
    pids.write(str(os.getpid()) + " ")
steps = 0
while True:
    steps += 1
    print("rank", os.environ["RANK"], "lives", flush=True)
    with open(place + "-new", "w") as mark:
        mark.write(str(steps))
    os.replace(place + "-new", place)
    time.sleep(0.1)
"""


class Bystanders:
    """The run of the owners ``h0`` and ``h1``; each worker counts its steps in a file."""

    def __init__(self, machines: Machines) -> None:
        self.machines, self.line = machines, CommandLine(machines)
        directory = machines.state(0).parent
        self.marks = directory / "marks"
        self.marks.mkdir()
        write_folder(directory / "bystander", _SCRIPT)
        self.run = self.start_run("h0,h1", directory / "bystander", "--restarts", "1000")
        self.generation = 1
        machines.until(lambda: self.live_workers() == 2, 90.0, "the run of the two owners is running")

    def start_run(self, on: str, folder: Path, *more: str) -> str:
        """Start a run of the first owner and return its name."""
        words = ("run", "--detach", "--on", on, "--set", f"MARKS={self.marks}", *more, "train.py")
        done = self.line.run(0, *words, folder=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def row(self) -> RunRow:
        return self.machines.ask(0, WatchRequest(run=self.run, wait_s=0), WatchResponse).row

    def live_workers(self) -> int:
        """Return the number of workers that made a step in the last seconds."""
        times = [self.marks / str(rank) for rank in _RANKS]
        return sum(path.exists() and time.time() - path.stat().st_mtime < 3.0 for path in times)

    def steps(self) -> list[int]:
        return [int((self.marks / str(rank)).read_text()) for rank in _RANKS]

    def restore(self) -> None:
        """Wait until the run continues, and count restarts from now."""
        self.machines.until(lambda: self.live_workers() == 2, 90.0, "the run continues again")
        self.generation = self.row().generation

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Ask for the status and look at the workers all the time; judge both at the end."""
        before, watch = self.steps(), _Watch(self)
        watch.start()
        try:
            yield
        finally:
            watch.stop()
        undisturbed(not watch.failures, f"status: {watch.failures[:1]}")
        undisturbed(watch.slowest_s < _SLOWEST_S, f"an answer took {watch.slowest_s:.1f} s")
        undisturbed(watch.longest_pause_s < _SLOWEST_S, f"a worker paused {watch.longest_pause_s:.1f} s")
        row = self.row()
        undisturbed((row.phase, row.generation) == ("running", self.generation), f"the run is {row.phase}")
        started = [len((self.marks / f"{rank}-pids").read_text().split()) for rank in _RANKS]
        undisturbed(started == [self.generation] * 2, "a worker was restarted")
        self.machines.until(
            lambda: all(new > old for new, old in zip(self.steps(), before, strict=True)), 30.0, "steps go on"
        )


class _Watch(threading.Thread):
    """A person at the first machine, and a look at both workers' files."""

    def __init__(self, work: Bystanders) -> None:
        super().__init__(daemon=True)
        self._work, self._over = work, threading.Event()
        self.failures: list[str] = []
        self.slowest_s = self.longest_pause_s = 0.0

    def run(self) -> None:
        while True:
            begin = time.monotonic()
            try:
                self._work.machines.status(0)
            except (BarnraiseError, OSError) as error:
                self.failures.append(str(error))
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
            for rank in _RANKS:
                age = time.time() - (self._work.marks / str(rank)).stat().st_mtime
                self.longest_pause_s = max(self.longest_pause_s, age)
            if self._over.wait(_ASK_S):
                return

    def stop(self) -> None:
        self._over.set()
        self.join(60.0)
