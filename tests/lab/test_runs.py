"""`barnraise run` on four machines of a lab, typed as a person types it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.agent_client.run_requests import RunsRequest, RunsResponse, WatchRequest, WatchResponse
from benchmarks.agents.machines import Machines
from benchmarks.agents.run_failures import left_over
from benchmarks.agents.runs import MARK, CommandLine, first_lines, write_folder
from lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(300)]

WAITS = MARK + "import time\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def network() -> Iterator[Lab]:
    with Lab(hosts=4, rate="1gbit") as lab:
        yield lab


@pytest.fixture(scope="module")
def machines(network: Lab) -> Iterator[Machines]:
    with Machines(network.hosts) as formed:
        formed.extra["BARNRAISE_RUNS_STOP_GRACE_S"] = "150"  # longer than the wait after a second Ctrl-C
        formed.form()
        yield formed


@pytest.fixture
def line(machines: Machines) -> Iterator[CommandLine]:
    """Every machine is up, and afterwards no worker is left anywhere."""
    for place, agent in enumerate(machines.agents):
        if agent is None:
            machines.start(place)
    machines.until(lambda: machines.agree(range(4)), 90.0, "all are here")
    yield CommandLine(machines)
    for place, agent in enumerate(machines.agents):
        if agent is None:
            machines.start(place)
    try:
        machines.until(lambda: not left_over(machines), 90.0, "no worker is left")
    except AssertionError as error:
        raise AssertionError(f"{left_over(machines)}\n{error}") from None


def only_run(machines: Machines, place: int) -> WatchResponse:
    """The newest run as this machine knows it."""
    runs = machines.ask(place, RunsRequest(), RunsResponse).runs
    return machines.ask(place, WatchRequest(run=runs[-1].run, wait_s=0), WatchResponse)


def until_phase(machines: Machines, place: int, phase: str, seconds: float = 60.0) -> WatchResponse:
    machines.until(lambda: only_run(machines, place).row.phase == phase, seconds, f"the run is {phase}")
    return only_run(machines, place)


def test_every_machine_works_and_the_result_comes_back(line: CommandLine, tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])\n"
        "import parts.part_007\n"
        "open('model.txt', 'w').write('made by rank ' + os.environ['RANK'])\n"
    )
    write_folder(tmp_path / "project", script, files=200)
    done = line.run(0, "run", "--all", "train.py", "--lr", "0.1", folder=tmp_path / "project")
    assert done.returncode == 0, done.stderr
    printed = sorted(re.findall(r"h(\d):(\d) rank \2 of 4 \['--lr', '0.1'\]", done.stdout))
    assert len(printed) == 4, done.stdout
    assert {host for host, _ in printed} == {"0", "1", "2", "3"}
    results = list((tmp_path / "project" / "barnraise-runs").glob("*/model.txt"))
    assert [path.read_text() for path in results] == ["made by rank 0"]


def test_first_failure_is_shown_first_with_its_machine(line: CommandLine, tmp_path: Path) -> None:
    script = (
        "import os, time\n"
        "if os.environ['RANK'] == '2':\n"
        "    raise ValueError('the loss is a banana')\n"
        "time.sleep(600)\n"
    )
    write_folder(tmp_path, script)
    done = line.run(1, "run", "train.py", folder=tmp_path, timeout=120)  # long before the others end
    assert done.returncode == 1
    last = done.stderr[done.stderr.index("--- last output") :]
    assert re.search(r"last output of rank 2 on h\d", last)
    assert "ValueError: the loss is a banana" in last
    assert 'File "' in last
    assert "failed: ValueError: the loss is a banana (train.py:3), on h" in last
    assert "barnraise logs train-" in last


def test_killed_worker_is_restarted(line: CommandLine, machines: Machines, tmp_path: Path) -> None:
    script = (
        "import os, signal, time\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('start', again)\n"
        "if os.environ['RANK'] == '0':\n"
        "    open(os.environ['SPOKE'], 'w').close()\n"
        "if os.environ['RANK'] == '1' and again == '0':\n"
        "    while not os.path.exists(os.environ['SPOKE']):\n"
        "        time.sleep(0.02)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(1 if again != '0' else 600)\n"
    )
    write_folder(tmp_path / "project", script)
    spoke = f"SPOKE={tmp_path / 'spoke'}"
    done = line.run(0, "run", "--set", spoke, "train.py", folder=tmp_path / "project")
    assert done.returncode == 0, done.stderr
    assert "was killed by signal 9" in done.stderr
    assert "start 0" in done.stdout
    assert "start 1" in done.stdout


def test_worker_that_keeps_dying_fails_the_run_with_reason(line: CommandLine, tmp_path: Path) -> None:
    script = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    write_folder(tmp_path, script)
    done = line.run(0, "run", "--restarts", "1", "--on", "h0,h1", "train.py", folder=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "after 1 restart; no restart is left" in done.stderr


def test_run_survives_death_of_its_starting_machine(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    """One that only started the run changes nothing; the run goes on and is seen from another."""
    marks = tmp_path / "marks"
    marks.mkdir()
    write_folder(tmp_path / "project", WAITS)
    line.start(
        3, "run", "--on", "h0,h1,h2", "--set", f"MARKS={marks}", "train.py", folder=tmp_path / "project"
    )
    first_lines(marks, 3, 120.0)
    machines.hosts[3].kill_all()
    machines.agents[3] = None
    machines.until(lambda: machines.agree(range(3)), 90.0, "the others know that it is gone")
    time.sleep(1.0)
    for place in (0, 1, 2):
        response = only_run(machines, place)
        assert (response.row.phase, response.row.generation) == ("running", 1)
        assert {worker.state for worker in response.workers} == {"running"}
    stopped = line.run(1, "stop", response.row.run)
    assert stopped.returncode == 0, stopped.stderr
    until_phase(machines, 2, "ended")


def test_run_continues_without_dead_machine(line: CommandLine, machines: Machines, tmp_path: Path) -> None:
    """The program is started again on the others from its own checkpoint, within seconds."""
    marks = tmp_path / "marks"
    marks.mkdir()
    script = (
        MARK + "import json, os, time\n"
        "step = json.load(open('step.json')) if os.path.exists('step.json') else 0\n"
        "print('from step', step, 'as', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open(os.path.join(os.environ['MARKS'], 'begun-' + again), 'w').close()\n"
        "while step < 20 or again == '0':\n"
        "    step += 1\n"
        "    json.dump(step, open('new', 'w'))\n"
        "    os.replace('new', 'step.json')\n"
        "    open(os.path.join(os.environ['MARKS'], 'saved-' + os.environ['RANK']), 'w').close()\n"
        "    time.sleep(0.1)\n"
    )
    write_folder(tmp_path / "project", script)
    running = line.start(0, "run", "--set", f"MARKS={marks}", "train.py", folder=tmp_path / "project")
    first_lines(marks, 4, 120.0)
    machines.until(lambda: (marks / "saved-0").exists(), 60.0, "the first has a checkpoint")
    machines.hosts[3].kill_all()
    machines.agents[3] = None
    killed = time.monotonic()
    machines.until(lambda: (marks / "begun-1").exists(), 90.0, "the others have begun again")
    took = time.monotonic() - killed
    assert running.wait(150) == 0, running.output()
    words = running.output()
    assert "h3 went away" in words
    assert re.search(r"from step [1-9]\d* as 0 of 3", words), words
    assert took < 60.0  # alone on a machine, a tenth of that


def test_control_c_stops_cleanly(line: CommandLine, machines: Machines, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    script = (
        "import signal, sys\n"
        "def leave(number, frame):\n"
        "    print('saved what I had', flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n" + WAITS
    )
    write_folder(tmp_path / "project", script)
    running = line.start(0, "run", "--set", f"MARKS={marks}", "train.py", folder=tmp_path / "project")
    first_lines(marks, 4, 120.0)
    time.sleep(0.5)
    running.signal(signal.SIGINT, group=True)
    assert running.wait(150) == 130
    assert "saved what I had" in running.output()
    assert "stopped from h0" in running.output()


def test_control_c_twice_ends_what_does_not_listen(
    line: CommandLine, machines: Machines, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    script = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS
    write_folder(tmp_path / "project", script)
    running = line.start(0, "run", "--set", f"MARKS={marks}", "train.py", folder=tmp_path / "project")
    first_lines(marks, 4, 120.0)
    time.sleep(0.5)
    running.signal(signal.SIGINT, group=True)
    machines.until(lambda: "Ctrl-C again" in running.output(), 60.0, "it knows of the first one")
    time.sleep(1.0)
    running.signal(signal.SIGINT, group=True)
    machines.until(lambda: not left_over(machines), 30.0, "sooner than the grace that one Ctrl-C gives")
    assert running.wait(150) == 130


def test_file_transfer_resumes_after_cut(
    line: CommandLine, machines: Machines, network: Lab, tmp_path: Path
) -> None:
    write_folder(tmp_path, "print('whole')\n")
    for number in range(8):
        (tmp_path / f"weights{number}.bin").write_bytes(os.urandom(8 << 20))
    known = {row.run for row in machines.ask(0, RunsRequest(), RunsResponse).runs}
    first, second = network.hosts[:2]
    network.set_rate(second, "40mbit")  # the transfer takes 13 seconds, so the cut comes before its end
    running = line.start(0, "run", "--on", "h0,h1", "--wait", "60s", "train.py", folder=tmp_path)

    def sent() -> int:
        runs = machines.ask(0, RunsRequest(), RunsResponse).runs
        parts = only_run(machines, 0).parts if {row.run for row in runs} - known else ()
        return max((part.done_bytes for part in parts if part.name == "h1"), default=0)

    try:
        machines.until(lambda: sent() > 4 << 20, 90.0, "some of it was sent")
        network.cut(first, second)
        time.sleep(6.0)
        at_cut = sent()
    finally:
        network.set_rate(second, "1gbit")
        network.heal(first, second)
    assert running.wait(150) == 0, running.output()
    assert at_cut < 8 * (8 << 20), "the cut came too late to prove anything"
    assert "whole" in running.output()
