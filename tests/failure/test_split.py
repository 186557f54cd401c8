"""A split model on three real agents: the worker of one is killed, comes back, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.agents.local import LocalAgents
from benchmarks.watch.session import row_of
from tests.repository import ROOT
from tests.unit.training.pipeline.block_model import write_base

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(900)]

PATIENCE_S = 300.0
STEPS = 180
SCRIPT = """
import json, os, sys, time
from pathlib import Path
marks = Path(sys.argv[1])
import barnraise, torch
from block_model import BlockModel, loader
torch.set_num_threads(1)
node = os.environ.get("BARNRAISE_NODE", "alone")
(marks / f"pid-{os.getpid()}").write_text(node)
run = barnraise.init(seed=0, unit=2)
with run.empty():
    model = BlockModel()
model, batches = run.split(
    model,
    loader(),
    weights=marks / "base",
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
)
for _ in run.epochs(60):
    for batch in batches:
        loss = model.train_step(batch)
        with open(marks / f"losses-{node}", "a") as file:
            file.write(json.dumps([run.step, run.world, loss]) + "\\n")
        while node != "alone" and run.step >= 8 and not (marks / "killed").exists():
            time.sleep(0.05)
        if (marks / "killed").exists() and not (marks / "go").exists():
            time.sleep(0.5)
run.save(marks / f"{node}.safetensors")
"""


def read_losses(path: Path) -> dict[int, float]:
    """Return the loss by step."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({step for step, _, _ in rows}) == len(rows), "a step was committed twice"
    return {step: loss for step, _, loss in rows}


def read_rows(path: Path) -> list[tuple[int, int]]:
    """Return step and number of workers of each row."""
    return [(step, world) for step, world, _ in map(json.loads, path.read_text().splitlines())]


def test_killed_worker_of_a_split_model_loses_nothing(tmp_path: Path) -> None:
    project, marks = tmp_path / "project", tmp_path / "marks"
    project.mkdir()
    write_base(marks / "base")
    model = ROOT / "tests" / "unit" / "training" / "pipeline" / "block_model.py"
    (project / "block_model.py").write_text(model.read_text())
    (project / "train.py").write_text(SCRIPT)
    with LocalAgents(3) as agents:
        agents.form()
        words = ("run", "--env", "agent", "--detach", "train.py", str(marks))
        done = agents.type(0, *words, folder=project)
        assert done.returncode == 0, done.stderr
        run = done.stdout.strip().splitlines()[-1]

        def workers() -> list[Path]:
            return sorted(marks.glob("pid-*"))

        def reached(step: int) -> bool:
            return any(step in read_losses(path) for path in marks.glob("losses-*"))

        agents.until(lambda: len(workers()) == 3 and reached(8), "three workers train", PATIENCE_S)
        os.kill(int(workers()[-1].name.removeprefix("pid-")), signal.SIGKILL)
        (marks / "killed").touch()
        killed_at = max(step for path in marks.glob("losses-*") for step, _ in read_rows(path))
        agents.until(
            lambda: any(
                world == 3 and step > killed_at + 1
                for path in marks.glob("losses-*")
                for step, world in read_rows(path)
            ),
            "the killed worker is back",
            PATIENCE_S,
        )
        (marks / "go").touch()
        agents.until(lambda: row_of(agents, run).phase == "ended", "the run has ended", PATIENCE_S)
    alone = train_alone(project, marks)
    saved = [path for path in marks.glob("*.safetensors") if path.stem != "alone"]
    assert saved
    for path in saved:
        trained = load_file(path)
        assert trained.keys() == alone.keys()
        for name, value in alone.items():
            assert (trained[name] - value).abs().max() < 1e-5, name
    expected = read_losses(marks / "losses-alone")
    assert sorted(expected) == list(range(1, STEPS + 1))
    seen: dict[int, float] = {}
    for path in marks.glob("losses-*"):
        for step, loss in read_losses(path).items():
            assert loss == pytest.approx(expected[step], abs=1e-5), (path.name, step)
            seen[step] = loss
    assert set(seen) == set(expected), "every step was committed"


def train_alone(project: Path, marks: Path) -> dict[str, torch.Tensor]:
    """Train in one process without an agent, and return the trained weights."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(project)])
    subprocess.run([sys.executable, "train.py", str(marks)], cwd=project, env=environment, check=True)
    return dict(load_file(marks / "alone.safetensors"))
