"""Training together on lab hosts, while workers, agents and machines die: equal to one patient machine."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from barnraise.agent_client.run_requests import RunsRequest, RunsResponse
from barnraise.runs.checkpoint_manifest import folder_step
from benchmarks.agents.commits import judge, read_commits
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine, worker_pids, write_variables
from lab import Lab, LabProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("session_program.py")
# For tests without silent peers: a wait for a timeout is detected, even on a busy machine.
PATIENT = {"BARNRAISE_LINK_SILENCE_S": "40"}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(hosts=4) as made:
        yield made


@pytest.fixture(scope="module")
def machines(lab: Lab) -> Iterator[Machines]:
    with Machines(lab.hosts) as formed:
        formed.form()
        yield formed


@pytest.fixture
def line(machines: Machines) -> CommandLine:
    for place, agent in enumerate(machines.agents):
        if agent is None:
            machines.start(place)
    machines.until(lambda: machines.agree(range(4)), 90.0, "all are here")
    return CommandLine(machines)


def finals(text: str) -> dict[str, tuple[float, ...]]:
    """Return the values that a worker printed at its end, by name."""
    matches = re.findall(r"final (\d+) (\S+) (\S+) (\S+)", text)
    return {name: (int(done), float(total), float(square)) for done, name, total, square in matches}


def alone(**variables: str) -> dict[str, tuple[float, ...]]:
    """The same program under plain python."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), **variables}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return finals(done.stdout)


def start(
    line: CommandLine, folder: Path, trace: Path, on: str, *, place: int = 0, **variables: str
) -> LabProcess:
    folder.mkdir()
    shutil.copy(PROGRAM, folder / "train.py")
    write_variables(folder, variables | {"BARNRAISE_TRACE_COMMITS": str(trace)})
    return line.start(place, "run", "--on", on, "train.py", folder=folder)


def coordinator(machines: Machines) -> int:
    return next(int(row.name[1]) for row in machines.status(3).nodes if row.coordinator)


def check_equal(actual: dict[str, tuple[float, ...]], expected: dict[str, tuple[float, ...]]) -> None:
    assert set(actual) == set(expected)
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, rel=1e-9, abs=1e-9), name


def check_trace(trace: Path, units: int, kills: int = 0) -> None:
    """Check that after every commit all members hold the same bytes, in order, and no micro-batch counts
    twice.
    """
    judgement = judge(read_commits(trace), units)
    assert judgement.violations == 0, judgement
    assert judgement.steps_not_judged <= kills, "only a killed member may not have written down a step"
    assert read_commits(trace)[0].step == 1


@pytest.mark.parametrize(("model", "optimizer"), [("images", "sgd"), ("words", "adamw")])
def test_three_machines_are_as_good_as_one(
    line: CommandLine, tmp_path: Path, model: str, optimizer: str
) -> None:
    options = {"MODEL": model, "OPTIMIZER": optimizer, "EPOCHS": "5"}
    running = start(line, tmp_path / "project", tmp_path / "trace", "h0,h1,h2", **options)
    assert running.wait(300) == 0, running.output()
    check_equal(finals(running.output()), alone(**options))
    check_trace(tmp_path / "trace", units=8)


def test_machines_that_compute_differently_train_together(line: CommandLine, tmp_path: Path) -> None:
    """One of them with other kernels of torch: the bits differ, and what is learned does not."""
    trace = tmp_path / "trace"
    options = {"MODEL": "images", "OPTIMIZER": "adamw", "EPOCHS": "5"}
    mixed = {"MIXED": "1", "BARNRAISE_LOG": "info"}
    running = start(line, tmp_path / "project", trace, "h0,h1,h2", **mixed, **options)
    assert running.wait(300) == 0, running.output()
    assert "differ in the last bits" in running.output()
    check_equal(finals(running.output()), alone(**options))
    # In such a group the trace has the hashes of what each step applied, which all workers share.
    check_trace(trace, units=8)
    match = re.search(r"run (train-\w+)", running.output())
    assert match is not None, running.output()
    logs = line.run(0, "logs", match[1], "--all", folder=tmp_path).stdout
    differences = re.findall(r"the largest difference was (\S+)", logs)
    assert any(float(difference) > 0 for difference in differences), "else this test shows nothing"


def test_rounds_of_local_steps_lose_nothing(line: CommandLine, machines: Machines, tmp_path: Path) -> None:
    """In int8, while a worker dies in the middle of a round and comes back; members go ahead meanwhile."""
    trace, hold = tmp_path / "trace", tmp_path / "hold"
    hold.touch()
    options = {"MODEL": "words", "EPOCHS": "60", "PERIOD": "5", "CODEC": "int8", "KIND": "float32"}
    running = start(line, tmp_path / "project", trace, "h0,h1,h2", DELAY="0.02", HOLD=str(hold), **options)
    machines.until(lambda: len(read_commits(trace)) > 15, 90.0, "there are rounds")
    time.sleep(0.7)
    killed = time.time()
    for pid in worker_pids(machines.hosts[1]):
        os.kill(pid, signal.SIGKILL)
    since = partial(_first_since, trace)
    machines.until(lambda: since(killed, 2) is not None, 90.0, "the others continue")
    alone_at = since(killed, 2)
    machines.until(lambda: since(alone_at, 3) is not None, 150.0, "it is back")
    hold.unlink()
    assert running.wait(300) == 0, running.output()
    assert "rounds of 5 steps" in running.output()
    check_trace(trace, units=8, kills=1)
    commits = read_commits(trace)
    assert {commit.of for commit in commits} >= {8, 40}, "single steps at first, then rounds"
    assert {commit.world for commit in commits} >= {2, 3}
    done = {values[0] for values in finals(running.output()).values()}
    assert done == {600.0}, "of ten batches, sixty times"


def test_machine_leaves_without_pause_of_training(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    """`barnraise down`: the others take it out of the group between two steps."""
    trace = tmp_path / "trace"
    options = {"DELAY": "0.02", "EPOCHS": "100000", "BARNRAISE_LOG": "info", **PATIENT}
    running = start(line, tmp_path / "project", trace, "h0,h1,h2", **options)
    machines.until(lambda: trace.exists() and trace.stat().st_size > 6000, 60.0, "training has begun")
    begin = time.time()
    assert line.run(2, "down", folder=tmp_path).returncode == 0
    machines.agents[2] = None
    machines.until(lambda: any(commit.world == 2 for commit in read_commits(trace)[-4:]), 90.0, "two go on")
    machines.until(lambda: "of 2: " in running.output(), 90.0, "it is said")
    machines.until(lambda: "h2 leaves; training continues on 2 machines" in running.output(), 90.0, "and why")
    time.sleep(1.0)
    output = running.output()
    running.signal(signal.SIGINT)
    assert running.wait(150) == 130
    check_trace(trace, units=8)
    assert "the group failed" not in output, "no step failed"
    times = sorted({commit.step: commit.at for commit in read_commits(trace)}.values())
    around = [later - earlier for earlier, later in pairwise(times) if later > begin]
    assert max(around) < 20.0, (
        "a step waited for a timeout (benchmarks.session.isolated_faults has the figures)"
    )


def test_killed_workers_come_back_and_nothing_changes(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    """Every few seconds one worker is killed, at any point of its step."""
    trace = tmp_path / "trace"
    options = {"MODEL": "images", "EPOCHS": "20"}
    hold = tmp_path / "hold"
    hold.touch()
    more = {"DELAY": "0.02", "HOLD": str(hold), **PATIENT}
    running = start(line, tmp_path / "project", trace, "h0,h1,h2", **options, **more)
    machines.until(lambda: trace.exists() and trace.stat().st_size > 2000, 90.0, "training has begun")
    chance = random.Random(7)
    kills = 0
    gaps = []
    until = time.monotonic() + 150
    while running.poll() is None and kills < 5 and time.monotonic() < until:
        time.sleep(chance.uniform(1.0, 3.0))
        alive = [pid for place in (0, 1, 2) for pid in worker_pids(machines.hosts[place])]
        members = {commit.pid for commit in read_commits(trace)[-6:]}
        victims = [pid for pid in alive if pid in members]
        if len(victims) < 2:
            continue
        begin = time.time()
        os.kill(chance.choice(victims), signal.SIGKILL)
        kills += 1
        machines.until(partial(_committed_since, trace, begin + 0.05), 90.0, "the others went on")
        gaps.append(time.time() - begin)
    hold.unlink()
    assert running.wait(300) == 0, running.output()
    assert kills >= 3
    check_equal(finals(running.output()), alone(**options))
    check_trace(trace, units=8, kills=kills)
    assert sorted(gaps)[len(gaps) // 2] < 15.0, gaps


def test_session_survives_death_of_coordinator(line: CommandLine, machines: Machines, tmp_path: Path) -> None:
    """It is one of those that train; another one has started the run."""
    trace, hold = tmp_path / "trace", tmp_path / "hold"
    hold.touch()
    options = {"MODEL": "images", "EPOCHS": "12"}
    place = coordinator(machines)
    others = [other for other in range(4) if other != place]
    starter, on = others[-1], ",".join(f"h{index}" for index in sorted([place, *others[:-1]]))
    running = start(line, tmp_path / "project", trace, on, place=starter, HOLD=str(hold), **options)
    machines.until(lambda: trace.exists() and trace.stat().st_size > 2000, 90.0, "training has begun")
    assert coordinator(machines) == place
    machines.hosts[place].kill_all()
    machines.agents[place] = None
    begin = time.time()
    machines.until(lambda: _committed_since(trace, begin + 0.05), 90.0, "the others went on")
    hold.unlink()
    assert running.wait(300) == 0, running.output()
    check_equal(finals(running.output()), alone(**options))
    check_trace(trace, units=8, kills=1)


def test_stopped_or_unreachable_worker_is_evicted_and_readmitted(
    line: CommandLine, machines: Machines, lab: Lab, tmp_path: Path
) -> None:
    """All machines live: one worker does nothing, later two machines cannot reach each other."""
    trace = tmp_path / "trace"
    running = start(line, tmp_path / "project", trace, "h0,h1,h2", DELAY="0.02", EPOCHS="100000")
    machines.until(lambda: trace.exists() and trace.stat().st_size > 2000, 60.0, "training has begun")

    def trained_by(world: int, since: float) -> bool:
        return any(commit.world == world and commit.at > since for commit in read_commits(trace)[-9:])

    # The coordinator's own, which then is the most junior, and yet not the one to be left out later.
    first = coordinator(machines) % 3
    (victim,) = worker_pids(machines.hosts[first])
    begin = time.time()
    os.kill(victim, signal.SIGSTOP)
    machines.until(lambda: trained_by(2, begin), 90.0, "the others went on")
    machines.until(lambda: not psutil.pid_exists(victim), 90.0, "it was ended")
    ended = time.time()
    machines.until(lambda: trained_by(3, ended), 90.0, "another came in its place")
    host, peer = machines.hosts[first], machines.hosts[(first + 1) % 3]
    begin = time.time()
    lab.cut(host, peer)
    try:
        machines.until(lambda: trained_by(2, begin), 90.0, "the others went on")
        apart = time.time()
    finally:
        lab.heal(host, peer)
    machines.until(lambda: trained_by(3, apart), 90.0, "it came back")
    running.signal(signal.SIGINT)
    assert running.wait(150) == 130
    check_trace(trace, units=8, kills=2)
    output = running.output()
    # Its own machine sees that it is stopped, or if that one is slow the others that it does nothing.
    assert re.search(r"h\d has a stopped worker|the worker on h\d does not respond", output), output
    assert "cannot reach each other" in output, output
    assert "receives the state while the others keep training" in output


def logs(machines: Machines, run: str) -> str:
    """Return the output of the workers, on any machine."""
    files = (path for place in range(4) for path in machines.state(place).glob(f"runs/{run}/logs/*"))
    return "\n".join(path.read_text(errors="replace") for path in files)


def _first_since(trace: Path, when: float, world: int) -> float | None:
    """Return when this number of members first committed something after ``when``."""
    return next(
        (commit.at for commit in read_commits(trace) if commit.at > when and commit.world == world), None
    )


def _committed_since(trace: Path, when: float) -> bool:
    commits = read_commits(trace)
    return bool(commits) and commits[-1].at > when


def test_all_machines_die_and_newest_checkpoint_remains(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    """All agents and workers die at once; when the agents are back, the run continues from the checkpoint.

    The only machine that has the checkpoint returns last: the others do not restart without it.
    """
    trace, hold = tmp_path / "trace", tmp_path / "hold"
    hold.touch()
    options = {"MODEL": "images", "EPOCHS": "10", "CHECKPOINT_S": "1", "COPIES": "1"}
    start(line, tmp_path / "project", trace, "h0,h1,h2", HOLD=str(hold), **options)
    machines.until(lambda: trace.exists() and trace.stat().st_size > 6000, 90.0, "training goes on")
    run = machines.ask(1, RunsRequest(), RunsResponse).runs[-1].run

    def saved(place: int) -> list[int]:
        names = (path.name for path in machines.state(place).glob(f"runs/{run}/checkpoints/step-*"))
        return sorted(step for name in names if (step := folder_step(name)) is not None)

    def newest(place: int) -> int:
        return max(saved(place), default=0)

    machines.until(lambda: any(map(newest, range(4))), 90.0, "there is a checkpoint")
    for place in range(4):
        machines.hosts[place].kill_all()
        machines.agents[place] = None
    hold.unlink()
    before = read_commits(trace)
    done = max(commit.step for commit in before)
    # Not all died in one moment: the last of them may have saved another one.
    holder = max(range(4), key=newest)
    stood = saved(holder)
    for place in range(4):
        if place != holder:
            machines.launch(place)
    message = f"for h{holder}: the checkpoint of step"
    machines.until(lambda: message in logs(machines, run), 120.0, "they wait")
    assert len(read_commits(trace)) == len(before)
    machines.launch(holder)
    for place in range(4):
        machines.await_answer(place)
    machines.until(lambda: len(read_commits(trace)) > len(before) + 30, 90.0, "it goes on")
    after = read_commits(trace)[len(before) :]
    first = min(commit.step for commit in after)
    assert 1 < first <= done + 1, "not from the beginning"
    assert first - 1 in stood[-2:], "the newest, or the one before if that one was not finished"
    repeated = judge(after, 8)
    assert repeated.violations == 0, repeated
    assert repeated.steps_not_judged <= 1, "the newest one, which a member is about to write down"
    ended = line.run(1, "attach", run, folder=tmp_path, timeout=200)
    assert ended.returncode == 0, ended.stderr
    check_equal(finals(ended.stdout), alone(**options))


def test_stopped_run_resumes_elsewhere_and_is_exported(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    """On fewer machines, from another one than started it; the result is that of one patient machine."""
    trace, hold = tmp_path / "trace", tmp_path / "hold"
    hold.touch()
    options = {"MODEL": "images", "EPOCHS": "8", "CHECKPOINT_S": "0.5"}
    more = {"HOLD": str(hold), "HOLD_S": "0.5"}
    running = start(line, tmp_path / "project", trace, "h0,h1,h2", **options, **more)
    machines.until(lambda: len(read_commits(trace)) > 24, 90.0, "training goes on")
    run = machines.ask(1, RunsRequest(), RunsResponse).runs[-1].run
    assert line.run(1, "resume", run, folder=tmp_path).returncode != 0, "it has not ended"
    assert line.run(2, "stop", run, folder=tmp_path).returncode == 0
    running.wait(150)
    hold.unlink()
    resumed = line.run(1, "resume", run, "--on", "h1,h0", folder=tmp_path, timeout=200)
    assert resumed.returncode == 0, resumed.stderr
    assert f"continues {run} on h1, h0" in resumed.stderr
    assert re.search(
        rf"resuming from the checkpoint of step \d+ of run {run}", resumed.stdout + resumed.stderr
    )
    check_equal(finals(resumed.stdout), alone(**options))
    newest = machines.ask(1, RunsRequest(), RunsResponse).runs[-1].run
    exported = line.run(1, "export", newest, str(tmp_path / "out"), folder=tmp_path)
    assert exported.returncode == 0, exported.stderr
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "layers.0.weight" in file.keys()  # noqa: SIM118  # it is no mapping
        assert file.metadata()["steps"] == str(facts["steps"])
    exported = line.run(3, "export", newest, str(tmp_path / "other"), folder=tmp_path)
    assert exported.returncode == 0, exported.stderr
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first), (
        "from a machine that had no part in it"
    )
