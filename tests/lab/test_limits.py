"""Pauses and limits of a machine that its user needs, obeyed by a running session without a loss."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.agents.commits import judge, last_commits, read_commits
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, worker_pids, write_variables
from lab import Lab, LabProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("session_program.py")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Lab(hosts=3) as lab, Machines(lab.hosts) as formed:
        formed.form()
        yield formed


@pytest.fixture
def line(machines: Machines) -> CommandLine:
    return CommandLine(machines)


class Training:
    """A session of the lab's small program that goes on as long as a file is there."""

    def __init__(self, line: CommandLine, folder: Path, *options: str) -> None:
        self._machines = line.machines
        self.trace, self._hold = folder / "trace", folder / "hold"
        self._hold.touch()
        project = folder / "project"
        project.mkdir()
        shutil.copy(PROGRAM, project / "train.py")
        write_variables(
            project,
            {
                "EPOCHS": "60",
                "DELAY": "0.02",
                "HOLD": str(self._hold),
                "BARNRAISE_TRACE_COMMITS": str(self.trace),
                "BARNRAISE_LINK_SILENCE_S": "40",  # a wait for a timeout would be seen
            },
        )
        self.running: LabProcess = line.start(0, "run", *options, "train.py", folder=project)

    def until_world(self, world: int) -> None:
        """Wait until the newest commit was made by this number of workers."""

        def has_come() -> bool:
            commits = last_commits(self.trace, 1) if self.trace.exists() else []
            return bool(commits) and commits[-1].world == world

        self._machines.until(has_come, 60.0, f"{world} machines train")

    @property
    def last_step(self) -> int:
        return last_commits(self.trace, 1)[-1].step

    def finish(self) -> str:
        """Let it come to its end, and check that no sample was lost or counted twice; return its output."""
        self._hold.unlink()
        assert self.running.wait(300) == 0, self.running.output()
        commits = read_commits(self.trace)
        assert judge(commits, 8).violations == 0
        assert max(commit.step for commit in commits) == 600, "of ten batches, sixty times"
        return self.running.output()


def typed(line: CommandLine, place: int, *words: str) -> str:
    done = line.run(place, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_paused_machine_leaves_a_session_and_comes_back(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    training = Training(line, tmp_path)
    training.until_world(3)
    printed = typed(line, 1, "pause", "--for", "2h")
    assert "This machine is paused: its user paused it until" in printed
    assert "continues on the other machines" in " ".join(printed.split())
    training.until_world(2)
    machines.until(lambda: not worker_pids(machines.hosts[1]), 30.0, "its worker has exited")
    status = typed(line, 0, "status")
    assert "h1 is paused: its user paused it until" in status
    assert "h1 is paused (its user paused it until" in training.running.output()
    assert "Runs may use this machine." in typed(line, 1, "resume-machine")
    training.until_world(3)
    assert "is paused" not in typed(line, 0, "status")
    output = training.finish()
    assert "failed" not in output
    assert "the group failed" not in output


def test_new_limits_take_effect_in_a_running_session(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    training = Training(line, tmp_path)
    training.until_world(3)
    before = worker_pids(machines.hosts[2])
    assert "processor cores: 1" in typed(line, 2, "limit", "--cpus", "1", "--rate", "200mbit")

    def is_limited() -> bool:
        now = [psutil.Process(pid) for pid in worker_pids(machines.hosts[2]) if pid not in before]
        return bool(now) and all(
            len(process.cpu_affinity()) == 1 and process.environ().get("BARNRAISE_SEND_MBPS") == "200"
            for process in now
        )

    try:
        machines.until(is_limited, 60.0, "it has a worker with these limits")
        training.until_world(3)
    finally:
        typed(line, 2, "limit", "--cpus", "none", "--rate", "none")
    training.until_world(3)
    training.finish()


def test_run_on_one_paused_machine_stands_still_and_goes_on(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    training = Training(line, tmp_path, "--on", "h0")
    training.until_world(1)
    assert "stands still until then" in " ".join(typed(line, 0, "pause").split())
    time.sleep(1.0)
    step = training.last_step
    time.sleep(3.0)
    assert training.last_step == step
    typed(line, 0, "resume-machine")
    machines.until(lambda: training.last_step > step, 30.0, "it goes on")
    training.finish()


def test_paused_machine_is_left_out_of_a_new_run_and_joins_later(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    typed(line, 2, "pause")
    machines.until(lambda: "h2 is paused" in typed(line, 0, "status"), 30.0, "the others know it")
    training = Training(line, tmp_path)
    training.until_world(2)
    assert "h2 takes no part: its user paused it" in training.running.output()
    assert not worker_pids(machines.hosts[2])
    typed(line, 2, "resume-machine")
    training.until_world(3)
    training.finish()


def test_run_that_asks_for_a_paused_machine_says_why_not(line: CommandLine, tmp_path: Path) -> None:
    typed(line, 1, "pause")
    try:
        (tmp_path / "train.py").write_text("print('hello')\n")
        done = line.run(0, "run", "--separate", "--on", "h0,h1", "train.py", folder=tmp_path)
        assert done.returncode == 1
        assert "h1: its user paused it." in " ".join(done.stderr.split())
        assert "barnraise resume-machine" in done.stderr
    finally:
        typed(line, 1, "resume-machine")


def test_worker_that_dies_during_a_pause_is_restarted_after_it(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    """A frozen worker keeps its memory, so the system may kill it in favour of a game."""
    training = Training(line, tmp_path, "--on", "h0", "--restarts", "3")
    training.until_world(1)
    typed(line, 0, "pause")
    time.sleep(1.0)
    (pid,) = worker_pids(machines.hosts[0])
    psutil.Process(pid).kill()
    machines.until(lambda: not worker_pids(machines.hosts[0]), 30.0, "it is gone")
    time.sleep(3.0)
    assert not worker_pids(machines.hosts[0]), "a paused machine starts no worker"
    typed(line, 0, "resume-machine")
    known = len(read_commits(training.trace))
    machines.until(lambda: len(read_commits(training.trace)) > known, 60.0, "it trains again")
    training.running.signal(signal.SIGINT)
    training.running.wait(60)


def test_session_whose_machines_pause_together_goes_on_where_it_was(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    training = Training(line, tmp_path, "--on", "h1,h2")
    training.until_world(2)
    for place in (1, 2):
        typed(line, place, "pause")
    machines.until(
        lambda: len(worker_pids(machines.hosts[1]) + worker_pids(machines.hosts[2])) == 1,
        90.0,
        "one machine keeps its worker, which stands still",
    )
    time.sleep(1.0)
    step = training.last_step
    time.sleep(2.0)
    assert training.last_step == step
    for place in (1, 2):
        typed(line, place, "resume-machine")
    training.until_world(2)
    training.finish()
