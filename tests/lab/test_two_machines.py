"""A session on two machines: if one dies, the other continues; a cut is resolved when it is over."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.agents.commits import Commit, judge, read_commits
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine
from lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PROGRAM = Path(__file__).with_name("session_program.py")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as made:
        yield made


@pytest.fixture(scope="module")
def machines(lab: Lab) -> Iterator[Machines]:
    with Machines(lab.hosts) as formed:
        formed.form()
        yield formed


@pytest.fixture
def training(machines: Machines, tmp_path: Path) -> Iterator[Path]:
    """The trace of a run on both that does not end by itself."""
    with _running(machines, tmp_path, 2) as trace:
        yield trace


@contextlib.contextmanager
def _running(machines: Machines, tmp_path: Path, world: int, *options: str) -> Iterator[Path]:
    for place in range(2):
        if machines.agents[place] is None:
            machines.start(place)
    machines.until(lambda: machines.agree(range(2)), 90.0, "both are here")
    trace, folder = tmp_path / "trace", tmp_path / "project"
    folder.mkdir()
    shutil.copy(PROGRAM, folder / "train.py")
    words = ["--set", f"BARNRAISE_TRACE_COMMITS={trace}", "--set", "DELAY=0.02", "--set", "EPOCHS=100000"]
    line = CommandLine(machines)
    run = line.run(0, "run", "--detach", *options, *words, "train.py", folder=folder).stdout.strip()
    machines.until(lambda: len({commit.pid for commit in _by(trace, world)}) >= world, 90.0, "all train")
    try:
        yield trace
    finally:
        stopped = line.run(0, "stop", run, "--hard", folder=folder)
    assert stopped.returncode == 0, stopped.stderr


def _by(trace: Path, world: int, since: float = 0.0) -> list[Commit]:
    return [commit for commit in read_commits(trace) if commit.world == world and commit.at > since]


def _until_fewer(machines: Machines, trace: Path, world: int, since: float) -> float:
    """Return when this small group first committed: commits of a larger group came later.

    A member of the larger group may write its earlier commits down at any time.
    """
    machines.until(lambda: bool(_by(trace, world, since)), 90.0, "the others continue")
    return _by(trace, world, since)[0].at


def _place_of_senior(machines: Machines) -> int:
    return next(int(row.name[1]) for row in machines.status(0).nodes if row.coordinator)


def test_either_worker_killed_training_continues(training: Path, machines: Machines) -> None:
    for rank in (0, 1):
        victim = next(commit.pid for commit in reversed(read_commits(training)) if commit.rank == rank)
        begin = time.time()
        os.kill(victim, signal.SIGKILL)
        alone_at = _until_fewer(machines, training, 1, begin)
        machines.until(
            lambda at=alone_at: len({commit.pid for commit in _by(training, 2, at)}) == 2,  # type: ignore[misc]
            90.0,
            "it is back",
        )
    _check(training)


def test_one_of_two_workers_of_a_machine(machines: Machines, tmp_path: Path) -> None:
    """A stopped worker is evicted, killed and replaced; the other worker of its machine trains on."""
    with _running(machines, tmp_path, 4, "--per-node", "2") as training:
        victim = next(commit.pid for commit in reversed(read_commits(training)) if commit.rank == 1)
        others = {commit.pid for commit in _by(training, 4)} - {victim}
        begin = time.time()
        os.kill(victim, signal.SIGSTOP)
        left_out_at = _until_fewer(machines, training, 3, begin)
        machines.until(lambda: not psutil.pid_exists(victim), 90.0, "it was ended")

        def trained() -> set[int]:
            return {commit.pid for commit in _by(training, 4, left_out_at)}

        machines.until(lambda: len(trained()) >= 4, 90.0, "another came in its place")
        assert others < trained(), "another worker was stopped"
        _check(training)


@pytest.mark.parametrize("senior", [True, False])
def test_either_machine_lost_training_continues(training: Path, machines: Machines, senior: bool) -> None:
    """Commits of a junior machine that is left alone are provisional until the senior one is back."""
    first = _place_of_senior(machines)
    victim = first if senior else 1 - first
    log_length = len(machines.agent_log(1 - victim))
    begin = time.time()
    machines.hosts[victim].kill_all()
    machines.agents[victim] = None
    machines.until(lambda: len(_by(training, 1, begin)) > 5, 90.0, "the other goes on")
    last = _by(training, 1, begin)[-1]
    if senior:
        machines.until(
            lambda: "without a majority, because" in machines.agent_log(1 - victim)[log_length:],
            90.0,
            "a report",
        )
    else:
        assert "without a majority, because" not in machines.agent_log(1 - victim)[log_length:]
    machines.start(victim)
    machines.until(lambda: bool(_by(training, 2, last.at)), 90.0, "both train again")
    assert _by(training, 2, last.at)[0].step > last.step, "what was trained meanwhile is history"
    assert "were discarded" not in machines.agent_log(1 - victim)[log_length:]
    _check(training)


def test_cut_between_two_machines_is_resolved_without_loss(
    training: Path, machines: Machines, lab: Lab
) -> None:
    """Both go on, one of them provisionally; afterwards the other's history counts."""
    first = _place_of_senior(machines)
    log_length = len(machines.agent_log(1 - first))
    begin = time.time()
    lab.cut(lab.hosts[0], lab.hosts[1])
    machines.until(
        lambda: len({commit.pid for commit in _by(training, 1, begin)}) == 2, 90.0, "both go on alone"
    )
    apart = time.time()
    machines.until(
        lambda: "without a majority, because" in machines.agent_log(1 - first)[log_length:],
        90.0,
        "one says how it goes on",
    )
    lab.heal(lab.hosts[0], lab.hosts[1])

    def together() -> list[Commit]:
        return [commit for commit in _by(training, 2, apart) if commit.rank == 0]

    machines.until(lambda: bool(together()), 90.0, "they train together again")
    machines.until(lambda: "were discarded" in machines.agent_log(1 - first)[log_length:], 90.0, "a report")
    elder = together()[0]
    kept = [commit.step for commit in _by(training, 1, begin) if commit.pid == elder.pid]
    assert elder.step == max(kept) + 1, "the first member is the one whose history counts"
    _check_told(training, machines, begin, elder, 1 - first)


def _check_told(trace: Path, machines: Machines, begin: float, elder: Commit, junior: int) -> None:
    """A person learns at either machine how many steps were for nothing."""
    form = r"run (\S+): (h\d had trained (\d+) steps alone; they are dropped, .* from step (\d+))"
    machines.until(lambda: re.search(form, machines.agent_log(junior)), 90.0, "the steps are told")
    report = re.findall(form, machines.agent_log(junior))[-1]
    dropped = [commit for commit in _by(trace, 1, begin) if commit.pid != elder.pid]
    assert abs(int(report[2]) - len(dropped)) <= 1, "all that the junior one committed alone"
    assert int(report[3]) >= elder.step - 1, "where both go on"
    for place in range(2):
        machines.until(
            lambda place=place: report[1] in CommandLine(machines).run(place, "logs", report[0]).stderr,  # type: ignore[misc]
            90.0,
            "it is read with the run's output",
        )


def _check(trace: Path) -> None:
    judgement = judge(read_commits(trace), 8)
    assert judgement.violations == 0, judgement
    assert judgement.steps_not_judged <= 2, "only a lost member may not have written down a step"
