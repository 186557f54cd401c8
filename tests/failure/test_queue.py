"""The queue on three real agents that share this computer: jobs, deaths, restarts, and a new coordinator."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from barnraise.agent_client.queue.requests import JobRow, ListJobsRequest, QueueResponse
from benchmarks.agents.local import LocalAgents

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(900)]

SCRIPT = """
import os, sys, time
from pathlib import Path
marks = Path(sys.argv[sys.argv.index("--marks") + 1])
seed = sys.argv[sys.argv.index("--seed") + 1]
(marks / f"{seed}-{os.getpid()}").write_text(os.environ["BARNRAISE_RUN"])
gate = marks / f"go-{seed}"
while not gate.exists() and not (marks / "go").exists():
    time.sleep(0.05)
if seed == os.environ.get("FAILS", "13"):
    sys.exit(3)
if seed == "14":
    raise ValueError("no such label")
Path("result.txt").write_text(seed)
(marks / f"done-{seed}-{os.getpid()}").touch()
"""


@pytest.fixture(scope="module")
def agents() -> Iterator[LocalAgents]:
    with LocalAgents(3) as formed:
        formed.form()
        yield formed


@pytest.fixture
def all_up(agents: LocalAgents) -> LocalAgents:
    agents.restore()
    return agents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "marks").mkdir()
    (tmp_path / "project" / "train.py").write_text(SCRIPT)
    return tmp_path / "project"


def add(agents: LocalAgents, place: int, folder: Path, *words: str, on: str = "") -> list[int]:
    marks = folder.parent / "marks"
    done = agents.type(
        place,
        "queue",
        "add",
        "--env",
        "agent",
        "--json",
        *(["--on", on] if on else []),
        "train.py",
        *words,
        "--marks",
        str(marks),
        folder=folder,
    )
    assert done.returncode == 0, done.stderr
    numbers: list[int] = json.loads(done.stdout)["jobs"]
    return numbers


def rows(agents: LocalAgents, place: int, jobs: list[int]) -> list[JobRow]:
    listed = agents.ask(place, ListJobsRequest(), QueueResponse).jobs
    return [row for row in listed if row.job in jobs]


def states(agents: LocalAgents, place: int, jobs: list[int]) -> Counter[str]:
    return Counter(row.state for row in rows(agents, place, jobs))


def started(folder: Path) -> set[str]:
    """Return the seeds of the scripts that have started."""
    names = (path.name for path in (folder.parent / "marks").iterdir())
    return {name.partition("-")[0] for name in names if name[0].isdigit()}


def test_jobs_run_one_per_device_and_their_results_come_back(all_up: LocalAgents, folder: Path) -> None:
    jobs = add(all_up, 1, folder, "--seed", "0..4", "--each", "device")
    assert len(jobs) == 5
    all_up.until(lambda: len(started(folder)) == 3, "three jobs run")
    assert states(all_up, 2, jobs) == {"running": 3, "waiting": 2}
    assert {row.machines for row in rows(all_up, 0, jobs) if row.state == "running"} == {
        ("h0",),
        ("h1",),
        ("h2",),
    }
    (folder.parent / "marks" / "go").touch()
    all_up.until(lambda: states(all_up, 0, jobs) == {"done": 5}, "all are done")
    assert [row.tries for row in rows(all_up, 0, jobs)] == [1] * 5
    # The list is shown on every machine, and the results come to any of them.
    printed = all_up.type(2, "queue", folder=folder)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.count("done") >= 5
    brought = all_up.type(2, "queue", "results", *map(str, jobs), folder=folder)
    assert brought.returncode == 0, brought.stderr
    results = {path.read_text() for path in (folder / "barnraise-runs").glob("*/result.txt")}
    assert results == {"0", "1", "2", "3", "4"}


def test_job_of_a_machine_that_died_runs_on_another_although_its_owner_is_off(
    all_up: LocalAgents, folder: Path
) -> None:
    """The machine that added the jobs coordinates, runs one of them, and is switched off."""
    owner = all_up.coordinator(0)
    others = [place for place in range(3) if place != owner]
    jobs = add(all_up, owner, folder, "--seed", "0..4")
    all_up.until(lambda: len(started(folder)) == 3, "three jobs run")
    (seed,) = (row.command[2] for row in rows(all_up, others[0], jobs) if row.machines == (f"h{owner}",))
    (mark,) = (folder.parent / "marks").glob(f"{seed}-*")
    all_up.kill(owner)
    pid = int(mark.name.partition("-")[2])
    all_up.until(lambda: not psutil.pid_exists(pid), "its worker has died with its agent")
    (folder.parent / "marks" / "go").touch()
    all_up.until(lambda: states(all_up, others[0], jobs) == {"done": 5}, "the others do all jobs")
    lost = [row for row in rows(all_up, others[0], jobs) if row.tries == 2]
    assert len(lost) == 1
    all_up.start(owner)
    all_up.until(lambda: states(all_up, owner, jobs) == {"done": 5}, "it learns what happened")
    done = [path.name.split("-")[1] for path in (folder.parent / "marks").glob("done-*")]
    assert sorted(done) == ["0", "1", "2", "3", "4"], "each job ended once"


def test_job_waits_for_its_files_while_only_a_machine_that_is_off_has_them(
    all_up: LocalAgents, folder: Path
) -> None:
    """The others are paused when the job is added, so they do not fetch its files."""
    (folder.parent / "marks" / "go").touch()
    (folder / "own.txt").write_text("no other machine has this folder from an earlier job\n")
    for place in (1, 2):
        assert all_up.type(place, "pause", folder=folder).returncode == 0
    jobs = add(all_up, 0, folder, "--seed", "30", on="h1,h2")
    all_up.kill(0)
    all_up.until(lambda: all_up.members(1) == 2, "the others go on")
    for place in (1, 2):
        assert all_up.type(place, "resume-machine", folder=folder).returncode == 0
    reason = "waits for its files, which only h0 has"
    all_up.until(lambda: rows(all_up, 1, jobs)[0].why == reason, "the table says why")
    all_up.until(lambda: rows(all_up, 2, jobs)[0].why == reason, "on each machine")
    assert [row.tries for row in rows(all_up, 1, jobs)] == [0]
    all_up.start(0)
    all_up.until(lambda: states(all_up, 1, jobs) == {"done": 1}, "it is done when its files are here")
    assert [row.tries for row in rows(all_up, 1, jobs)] == [1]


def test_queue_survives_a_restart_of_all_agents(all_up: LocalAgents, folder: Path) -> None:
    jobs = add(all_up, 0, folder, "--seed", "0..3")
    all_up.until(lambda: len(started(folder)) == 3, "three jobs run")
    for place in range(3):
        all_up.kill(place)
    for place in range(3):
        all_up.start(place)
    assert sum(states(all_up, 1, jobs).values()) == 4
    (folder.parent / "marks" / "go").touch()
    all_up.until(lambda: states(all_up, 2, jobs) == {"done": 4}, "all are done")


def test_failed_jobs_are_tried_elsewhere_and_dependants_are_cancelled(
    all_up: LocalAgents, folder: Path
) -> None:
    (folder.parent / "marks" / "go").touch()
    failing = add(all_up, 0, folder, "--seed", "13")
    dependent = add(all_up, 1, folder, "--seed", "0", "--after", str(failing[0]))
    bound = add(all_up, 1, folder, "--seed", "1", on="h2")
    all_up.until(lambda: states(all_up, 0, dependent) == {"cancelled": 1}, "what depends on it is cancelled")
    (row,) = rows(all_up, 0, failing)
    assert (row.state, row.tries) == ("failed", 2)
    assert "exited with code 3" in row.why
    raising = add(all_up, 0, folder, "--seed", "14", "--retries", "0", on="h1")
    all_up.until(lambda: states(all_up, 2, raising) == {"failed": 1}, "a job that raises has failed")
    (row,) = rows(all_up, 2, raising)
    assert row.why == "ValueError: no such label (train.py:13), on h1", "the error and the machine, no rank"
    all_up.until(lambda: states(all_up, 0, bound) == {"done": 1}, "other jobs go on")
    (row,) = rows(all_up, 0, bound)
    assert row.machines == ("h2",)


def test_cancelled_and_killed_jobs_end_once(all_up: LocalAgents, folder: Path) -> None:
    jobs = add(all_up, 0, folder, "--seed", "20..23")
    all_up.until(lambda: len(started(folder)) == 3, "three jobs run")
    running = [row.job for row in rows(all_up, 0, jobs) if row.state == "running"]
    waiting = next(job for job in jobs if job not in running)
    printed = all_up.type(2, "queue", "cancel", str(running[0]), folder=folder)
    assert printed.stdout == "cancelled 1 job\n", printed.stderr
    all_up.until(lambda: rows(all_up, 0, [waiting])[0].state == "running", "the last one starts")
    killed = next(path for path in (folder.parent / "marks").glob("21-*"))
    os.kill(int(killed.name.partition("-")[2]), signal.SIGKILL)
    all_up.until(lambda: len(list((folder.parent / "marks").glob("21-*"))) == 2, "it is started again")
    (folder.parent / "marks" / "go").touch()
    all_up.until(lambda: states(all_up, 1, jobs) == {"done": 3, "cancelled": 1}, "all have ended")
