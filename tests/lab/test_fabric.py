"""The example of Fabric on lab hosts: a worker is killed and returns, and the loss is that of one machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.agents.commits import judge, read_commits
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine
from lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = REPOSITORY / "examples" / "fabric.py"
BACKWARD = "fabric.backward(loss)\n"
# As long as a file is there, the training does not come to its end soon.
HELD = "fabric.backward(loss); import os, time; time.sleep(0.3 * os.path.exists(os.environ['HOLD']))\n"


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Lab(hosts=2) as lab, Machines(lab.hosts) as formed:
        formed.form()
        yield formed


def final(printed: str) -> float:
    match = re.search(r"final loss ([\d.]+)", printed)
    assert match is not None, printed
    return float(match[1])


def test_example_survives_a_killed_worker(machines: Machines, tmp_path: Path) -> None:
    trace, hold = tmp_path / "trace", tmp_path / "hold"
    project, alone = tmp_path / "project", tmp_path / "alone"
    hold.touch()
    for folder in (project, alone):
        folder.mkdir()
    text = EXAMPLE.read_text()
    assert text.count(BACKWARD) == 1
    (project / "train.py").write_text(text.replace(BACKWARD, HELD))
    variables = {"HOLD": hold, "BARNRAISE_TRACE_COMMITS": trace, "OMP_NUM_THREADS": 1}
    words = [f"--set={name}={value}" for name, value in variables.items()]
    running = CommandLine(machines).start(0, "run", *words, "train.py", "--small", folder=project)

    def world_since(when: float, world: int) -> bool:
        return any(commit.at > when and commit.world == world for commit in read_commits(trace))

    machines.until(lambda: world_since(0.0, 2), 120.0, "two train")
    victim = next(commit.pid for commit in reversed(read_commits(trace)) if commit.rank == 1)
    os.kill(victim, signal.SIGKILL)
    killed = time.time()
    machines.until(lambda: world_since(killed, 1), 120.0, "the other one continues")
    alone_at = time.time()
    machines.until(lambda: world_since(alone_at, 2), 150.0, "it is back")
    hold.unlink()
    assert running.wait(300) == 0, running.output()

    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--small"]
    done = subprocess.run(
        command, cwd=alone, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    # float32: the workers add the same gradients in another order.
    assert final(running.output()) == pytest.approx(final(done.stdout), abs=1e-4)
    expected = torch.load(alone / "spiral.ckpt", weights_only=True)["model"]
    (returned,) = (project / "barnraise-runs").glob("*/spiral.ckpt")
    written = torch.load(returned, weights_only=True)["model"]
    for name, values in expected.items():
        torch.testing.assert_close(written[name], values, rtol=1e-3, atol=1e-3)
    judgement = judge(read_commits(trace), units=8)
    assert judgement.violations == 0, judgement
    assert judgement.steps_not_judged <= 1
