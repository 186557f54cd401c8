"""Maps on lab hosts, while workers are killed: each result is that of one machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine, worker_pids
from benchmarks.evaluate.__main__ import PROGRAM, computed
from lab import Lab, LabProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ITEMS = 400


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Lab(hosts=3) as lab, Machines(lab.hosts) as formed:
        formed.own = [{"HOST": f"h{place}", "SLOWNESS": str(place + 1)} for place in range(3)]
        formed.form()
        yield formed


def start(machines: Machines, folder: Path) -> LabProcess:
    project = folder / "project"
    project.mkdir()
    shutil.copy(PROGRAM, project / "train.py")
    words = [f"--set={name}={value}" for name, value in variables(folder).items()]
    return CommandLine(machines).start(0, "run", *words, "train.py", folder=project)


def variables(folder: Path) -> dict[str, str]:
    own = {"COUNT": str(ITEMS), "ITEM_S": "0.05", "OUT": str(folder / "out"), "TRACE": str(folder / "trace")}
    return own | {"OMP_NUM_THREADS": "1"}


def check_results(folder: Path, hosts: set[str]) -> None:
    """Compare the results of every worker with those of the script under plain python.

    ``hosts``: those that have results in any case. A worker that returns after the end has none.
    """
    files = sorted(folder.glob("out-h*"))
    assert {file.name.removeprefix("out-") for file in files} >= hosts
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), **variables(folder), "ITEM_S": "0"}
    environment["TRACE"] = str(folder / "trace-alone")
    subprocess.run([sys.executable, str(PROGRAM)], env=environment, check=True, timeout=200)
    expected = load_file(folder / "out-alone")["results"]
    assert all(torch.equal(load_file(file)["results"], expected) for file in files)
    assert set(computed(folder / "trace")) == set(range(ITEMS))


def kill(machines: Machines, place: int) -> None:
    os.kill(worker_pids(machines.hosts[place])[0], signal.SIGKILL)


def test_killed_workers_come_back_and_all_results_are_those_of_one_machine(
    machines: Machines, tmp_path: Path
) -> None:
    running = start(machines, tmp_path)
    trace = tmp_path / "trace"
    for part, place in ((60, 1), (120, 0)):  # the second one is the main worker
        machines.until(lambda part=part: computed(trace).total() > part, 120.0, f"{part} items")
        kill(machines, place)
    assert running.wait(300) == 0, running.output()
    check_results(tmp_path, {"h2"})
    assert computed(trace).total() <= ITEMS + 60, "only what a killed worker had not sent is computed again"


def test_results_survive_the_death_of_all_workers(machines: Machines, tmp_path: Path) -> None:
    running = start(machines, tmp_path)
    trace = tmp_path / "trace"
    machines.until(lambda: computed(trace).total() > ITEMS // 2, 120.0, "half of the items")
    for place in range(3):
        kill(machines, place)
    assert running.wait(300) == 0, running.output()
    check_results(tmp_path, set())
    assert list(tmp_path.glob("out-h*"))
    assert computed(trace).total() <= ITEMS + 60
