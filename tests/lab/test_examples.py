"""Examples in runs of two machines while a worker is killed: the training is that of one machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.agents.commits import judge, read_commits
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine
from lab import Lab
from tests.stand_in_mnist import write_mnist

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = REPOSITORY / "examples"
BACKWARD = "                loss.backward()\n"
# While the file is there, micro-batches take so long that a worker can die and return.
HELD = (
    BACKWARD
    + """\
                if os.path.exists(os.environ["HOLD"]):
                    __import__("time").sleep(float(os.environ["HOLD_S"]))
"""
)
UNITS = 8  # micro-batches of a step
TOLERANCE = 1e-3  # relative for losses, which have four digits; absolute and relative for parameters


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Lab(hosts=2) as lab, Machines(lab.hosts) as formed:
        formed.extra = {"OMP_NUM_THREADS": "1"}
        formed.form()
        yield formed


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"epoch \d+ of \d+: loss ([\d.]+), workers: \d", output)]


def alone(folder: Path, script: str, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_and_kill(
    machines: Machines, folder: Path, script: str, *words: str, hold_s: float
) -> tuple[str, Path]:
    """Run an example on both machines and kill one worker; return the output and the folder of results.

    Every step was committed once, with each micro-batch once, and by both workers at its end.
    """
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    assert text.count(BACKWARD) == 1
    (folder / script).write_text(text.replace(BACKWARD, HELD), encoding="utf-8")
    trace, hold = folder.parent / "trace", folder.parent / "hold"
    hold.touch()
    variables = (f"--set=HOLD={hold}", f"--set=HOLD_S={hold_s}", f"--set=BARNRAISE_TRACE_COMMITS={trace}")
    running = CommandLine(machines).start(0, "run", *variables, script, *words, folder=folder)
    machines.until(lambda: {commit.rank for commit in read_commits(trace)} == {0, 1}, 120.0, "both train")
    (victim,) = pids(trace) & set(machines.hosts[1].pids())
    os.kill(victim, signal.SIGKILL)
    machines.until(lambda: len(pids(trace)) == 3, 120.0, "a new worker has trained, too")
    hold.unlink()
    assert running.wait(300) == 0, running.output()
    judgement = judge(read_commits(trace), UNITS)
    assert judgement.violations == 0, judgement
    assert judgement.steps_not_judged <= 1, "only the killed worker may not have written down a step"
    assert read_commits(trace)[0].step == 1
    assert read_commits(trace)[-1].world == 2
    (results,) = (folder / "barnraise-runs").iterdir()
    return running.output(), results


def pids(trace: Path) -> set[int]:
    return {commit.pid for commit in read_commits(trace)}


def check_tensors(file: Path, expected: Path) -> None:
    actual, alone = load_file(file), load_file(expected)
    assert actual.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(actual[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_digits_are_learned_and_evaluated_as_on_one_machine(machines: Machines, tmp_path: Path) -> None:
    project = tmp_path / "project"
    write_mnist(project / "mnist", 1024, 10_000)
    words = ("--epochs", "6", "--batch", "128")
    output, results = run_and_kill(machines, project, "digits.py", *words, hold_s=0.5)
    (tmp_path / "alone").mkdir()
    expected = alone(tmp_path / "alone", "digits.py", "--data", str(project / "mnist"), *words)
    assert losses(output) == pytest.approx(losses(expected), rel=TOLERANCE)
    assert len(losses(output)) == 6
    check_tensors(results / "digits.safetensors", tmp_path / "alone" / "digits.safetensors")

    (results / "digits.safetensors").rename(project / "digits.safetensors")
    (project / "evaluate_digits.py").write_text((EXAMPLES / "evaluate_digits.py").read_text("utf-8"), "utf-8")
    done = CommandLine(machines).run(0, "run", "evaluate_digits.py", folder=project)
    assert done.returncode == 0, done.stderr
    alone(project, "evaluate_digits.py")
    (mistakes,) = (project / "barnraise-runs").glob("evaluate*/mistakes.csv")
    assert mistakes.read_text() == (project / "mistakes.csv").read_text()
    share = re.search(r"([\d.]+)% of 10000 images are right, workers: 2", done.stdout)
    assert share is not None, done.stdout
    assert float(share[1]) > 50


def test_adapter_of_diffusion_model_is_that_of_one_machine(machines: Machines, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    words = ("--pictures", "96", "--epochs", "4")
    output, results = run_and_kill(machines, project, "diffusion_lora.py", *words, hold_s=2.0)
    (tmp_path / "alone").mkdir()
    expected = alone(tmp_path / "alone", "diffusion_lora.py", *words)
    assert losses(output) == pytest.approx(losses(expected), rel=TOLERANCE)
    assert len(losses(output)) == 4
    file = Path("adapter") / "pytorch_lora_weights.safetensors"
    check_tensors(results / file, tmp_path / "alone" / file)
