"""``barnraise eval`` on three agents while a worker is killed: the numbers are those of one machine.

It runs where ``lm_eval[hf]`` is installed, which the environment of the checks leaves out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine
from lab import Host, Lab
from tests.unit.integrations.evaluation_files import write_model, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

_MODULE = "barnraise.integrations.lm_eval"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def numbers(file: Path) -> dict[str, dict[str, float]]:
    results = json.loads(file.read_text())["results"]
    return {
        task: {name: each for name, each in rows.items() if name != "alias"} for task, rows in results.items()
    }


def worker_of(host: Host) -> int:
    (pid,) = (pid for pid in host.pids() if _MODULE in psutil.Process(pid).cmdline())
    return pid


def test_numbers_of_three_machines_and_a_kill_are_those_of_one(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    project = tmp_path / "project"
    project.mkdir()
    write_tasks(project, 240)
    model = write_model(tmp_path)
    words = ["--model", str(model), "--tasks", "choose,write", "--include-path", "tasks", "--requests", "8"]
    offline = {**_OFFLINE, "HF_HOME": str(tmp_path / "cache")}
    with Lab(hosts=3) as lab, Machines(lab.hosts) as machines:
        machines.extra = offline
        machines.form()
        running = CommandLine(machines).start(0, "eval", *words, folder=project)

        def kept() -> int:
            files = machines.state(2).rglob("maps/2.results")
            return sum(file.stat().st_size for file in files)

        machines.until(lambda: kept() > 2000 or running.poll() is not None, 600.0, "machine 2 has results")
        os.kill(worker_of(lab.hosts[2]), signal.SIGKILL)
        assert running.wait(2000) == 0, running.output()
    (file,) = project.rglob("eval.json")
    environment = {**os.environ, **offline, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-m", _MODULE, *words, "--output", "alone.json"]
    subprocess.run(command, cwd=project, env=environment, check=True, timeout=600)
    assert numbers(file) == numbers(project / "alone.json")
    assert 0.1 < numbers(file)["choose"]["acc,none"] < 0.9
