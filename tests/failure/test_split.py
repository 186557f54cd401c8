"""A split model on three real agents: workers are killed, stopped or refused, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from barnraise.collectives.torch_patch.torch_version import has_python_backends
from barnraise.runs.checkpoint_manifest import part_name
from benchmarks.agents.local import LocalAgents
from benchmarks.watch.session import row_of
from tests.repository import ROOT
from tests.unit.training.pipeline.block_model import BLOCKS, write_base

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clocks,
    pytest.mark.timeout(900),
    pytest.mark.skipif(has_python_backends(torch.__version__), reason="this torch is refused"),
]

PATIENCE_S = 300.0
STEPS = 180
SCRIPT = """
import json, os, sys, time
from pathlib import Path
marks = Path(sys.argv[1])
import barnraise, torch
from block_model import BlockModel, loader, train_only
torch.set_num_threads(1)
whole = len(sys.argv) > 2
if whole:
    from limited_memory import limit_memory
    limit_memory(int(sys.argv[2]))
node = os.environ.get("BARNRAISE_NODE", "alone")
(marks / f"pid-{os.getpid()}").write_text(node)
run = barnraise.init(seed=0, unit=2, checkpoint_s=6.0 if whole else 1.0)
with run.empty():
    model = BlockModel()
if whole:
    model.requires_grad_(True)
if (marks / f"other-{node}").exists():
    train_only(model, [3])
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
        if node != "alone" and run.step >= 8 and not (marks / "go").exists():
            time.sleep(0.5)
run.save(marks / f"{node}.safetensors")
"""


# As on machines with so little memory that no one can hold the whole model with its optimizer.
LIMITED_MEMORY = """
from barnraise.training.pipeline import split_loop, split_training
from barnraise.training.pipeline.members.member_stage import MemberStage
from barnraise.training.pipeline.prediction import forecast

def limit_memory(limit):
    split_loop.free_memory = lambda device: limit
    MemberStage.held_bytes = lambda self: 0
    split_training.with_kept = forecast.with_kept = lambda parts, kept: parts
"""
MEMORY = 24_000  # bytes of a machine: the model takes 25 kB with its optimizer, and 9 kB more on two


def read_losses(path: Path) -> dict[int, float]:
    """Return the loss by step."""
    return {step: loss for step, _, loss in map(json.loads, path.read_text().splitlines())}


def read_rows(path: Path) -> list[tuple[int, int]]:
    """Return step and number of workers of each row."""
    return [(step, world) for step, world, _ in map(json.loads, path.read_text().splitlines())]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folder of the script, and that of the base and of what the workers write."""
    project, marks = tmp_path / "project", tmp_path / "marks"
    project.mkdir()
    write_base(marks / "base")
    model = ROOT / "tests" / "unit" / "training" / "pipeline" / "block_model.py"
    (project / "block_model.py").write_text(model.read_text())
    (project / "train.py").write_text(SCRIPT)
    (project / "limited_memory.py").write_text(LIMITED_MEMORY)
    return project, marks


def rows_of(marks: Path) -> list[tuple[int, int]]:
    """Return step and number of workers of each row that a worker has written."""
    return [row for path in marks.glob("losses-*") for row in read_rows(path)]


@contextlib.contextmanager
def training(project: Path, marks: Path) -> Iterator[tuple[LocalAgents, str]]:
    """Yield three agents and the run that all of them train."""
    with LocalAgents(3) as agents:
        agents.form()
        words = ("run", "--env", "agent", "--detach", "train.py", str(marks))
        done = agents.type(0, *words, folder=project)
        assert done.returncode == 0, done.stderr
        until_trained(agents, marks, 3, 7)
        assert len(list(marks.glob("pid-*"))) == 3
        yield agents, done.stdout.strip().splitlines()[-1]


def until_trained(agents: LocalAgents, marks: Path, world: int, after: int) -> None:
    """Wait until this many workers have trained a step after that one."""

    def is_done() -> bool:
        return any(workers == world and step > after for step, workers in rows_of(marks))

    agents.until(is_done, f"{world} workers train", PATIENCE_S)


def until_ended(agents: LocalAgents, run: str, project: Path, marks: Path) -> dict[str, Any]:
    """Let the run go on to its end, and return its history."""
    (marks / "go").touch()
    agents.until(lambda: row_of(agents, run).phase == "ended", "the run has ended", PATIENCE_S)
    shown = agents.type(0, "runs", "history", run, "--json", folder=project)
    assert shown.returncode == 0, shown.stderr
    return dict(json.loads(shown.stdout))


def newest_step(marks: Path) -> int:
    """Return the newest step that a worker has trained."""
    return max(rows_of(marks))[0]


def worker_of(agents: LocalAgents, place: int, marks: Path) -> psutil.Process:
    """Return the newest worker of an agent."""
    agent = agents.agents[place]
    assert agent is not None
    own = {child.pid for child in psutil.Process(agent.pid).children(recursive=True)}
    pids = [int(path.name.removeprefix("pid-")) for path in marks.glob("pid-*")]
    return next(psutil.Process(pid) for pid in pids if pid in own)


def checkpoints_of(agents: LocalAgents) -> list[Path]:
    """Return the checkpoints on all disks."""
    places = range(agents.count)
    return [path for place in places for path in agents.state(place).glob("runs/*/checkpoints/step-*")]


@pytest.mark.parametrize("victims", [1, 2])
def test_deaths_of_workers_change_no_result(victims: int, folders: tuple[Path, Path]) -> None:
    """The first victim's mirror has its state; of two neighbours, a checkpoint has it."""
    project, marks = folders
    with training(project, marks) as (agents, run):
        if victims > 1:  # a checkpoint of all stages is on a disk
            agents.until(lambda: checkpoints_of(agents), "a checkpoint is written", PATIENCE_S)
        for worker in sorted(marks.glob("pid-*"))[:victims]:
            os.kill(int(worker.name.removeprefix("pid-")), signal.SIGKILL)
        until_trained(agents, marks, 3, newest_step(marks) + 1)
        history = until_ended(agents, run, project, marks)
    check_results(project, marks, history)
    assert {"failure", "died"} & {event["kind"] for event in history["events"]}


@pytest.mark.parametrize("what", ["worker", "machine"])
def test_stopped_worker_is_left_out_and_another_joins_in_its_place(
    what: str, folders: tuple[Path, Path]
) -> None:
    """A stopped process keeps its links open. Its own agent sees it; that of a stopped machine is stopped."""
    project, marks = folders
    with training(project, marks) as (agents, run):
        agent, worker = agents.agents[1], worker_of(agents, 1, marks)
        assert agent is not None
        machine = psutil.Process(agent.pid)
        stopped = [machine, *machine.children(recursive=True)] if what == "machine" else [worker]
        stopped_at = newest_step(marks)
        for process in stopped:
            process.suspend()
        try:
            until_trained(agents, marks, 2, stopped_at + 1)
            going_on = newest_step(marks)
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        until_trained(agents, marks, 3, going_on + 1)
        agents.until(lambda: not psutil.pid_exists(worker.pid), "the old worker is gone", PATIENCE_S)
        assert len(list(marks.glob("pid-*"))) == 4, "one other worker has started"
        history = until_ended(agents, run, project, marks)
    check_results(project, marks, history)


def test_worker_with_another_model_is_refused_and_not_started_again(folders: tuple[Path, Path]) -> None:
    project, marks = folders
    with training(project, marks) as (agents, run):
        victim = worker_of(agents, 1, marks)
        node = (marks / f"pid-{victim.pid}").read_text()
        (marks / f"other-{node}").touch()
        victim.kill()

        def said(place: int) -> str:
            logs = agents.state(place).glob(f"runs/{run}/logs/*")
            return "\n".join(path.read_text(errors="replace") for path in logs)

        agents.until(lambda: "it trains 48 numbers" in said(1), "it has read the reason", PATIENCE_S)
        until_trained(agents, marks, 2, newest_step(marks) + 3)
        history = until_ended(agents, run, project, marks)
        assert "h1 is refused by the other workers: it trains 48 numbers" in said(0) + said(2)
        assert "[worker-refused]" in said(1)
    assert len(list(marks.glob("pid-*"))) == 4, "a refused worker is not started again"
    check_results(project, marks, history)


def check_results(project: Path, marks: Path, history: dict[str, Any]) -> None:
    """Compare all losses, the trained weights and the record of the run with one process."""
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
    seen: set[int] = set()
    for path in marks.glob("losses-*"):
        losses = read_losses(path)
        seen |= losses.keys()
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], abs=1e-5), (path.name, step)
    assert seen == expected.keys(), "every step was committed"
    check_history(history, expected)


def test_full_fine_tuning_goes_on_from_parts_of_a_checkpoint_on_fewer_machines(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """All workers are killed, and one machine does not come back: the others have copies of its parts."""
    project, marks = folders
    shutil.rmtree(marks / "base")
    write_base(marks / "base", None)
    with LocalAgents(3) as agents:
        agents.form()
        words = ("run", "--env", "agent", "--detach", "train.py", str(marks), str(MEMORY))
        done = agents.type(0, *words, folder=project)
        assert done.returncode == 0, done.stderr
        run = done.stdout.strip().splitlines()[-1]

        def rows() -> list[tuple[int, int]]:
            return [row for path in marks.glob("losses-*") for row in read_rows(path)]

        agents.until(lambda: any(step >= 8 and world == 3 for step, world in rows()), "all train", PATIENCE_S)
        agents.until(lambda: has_copies(agents), "each part is on two machines", PATIENCE_S)
        for worker in sorted(marks.glob("pid-*")):
            os.kill(int(worker.name.removeprefix("pid-")), signal.SIGKILL)
        agents.kill(2)
        killed_at = max(rows())[0]

        def goes_on() -> bool:
            return any(world == 2 and step > killed_at + 1 for step, world in rows())

        agents.until(goes_on, "two machines train", PATIENCE_S)
        (marks / "go").touch()
        agents.until(lambda: row_of(agents, run).phase == "ended", "the run has ended", PATIENCE_S)
        exported = agents.type(0, "export", run, str(tmp_path / "exported"), folder=project)
        output = agents.type(0, "logs", run, folder=project).stdout
    assert exported.returncode == 0, exported.stderr
    assert min(step for step, world in rows() if world == 2) > 1, "it did not start again"
    assert "is in 7 parts" in " ".join(output.split())
    assert "training goes back to the newest checkpoint" in " ".join(output.split())
    alone = train_alone(project, marks, str(MEMORY * 100))
    expected = read_losses(marks / "losses-alone")
    assert sorted(expected) == list(range(1, STEPS + 1))
    seen: set[int] = set()
    for path in marks.glob("losses-*"):
        losses = read_losses(path)
        seen |= losses.keys()
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], abs=1e-5), (path.name, step)
    assert seen == expected.keys(), "every step was committed"
    model = load_file(tmp_path / "exported" / "model.safetensors")
    assert {name: value.shape for name, value in model.items()} == {
        name: value.shape for name, value in alone.items()
    }


def has_copies(agents: LocalAgents) -> bool:
    """Tell whether each part of a checkpoint is on two disks: written by a mirror, or copied by an agent."""
    copies = Counter(
        (path.parent.name, path.name)
        for place in range(agents.count)
        for path in agents.state(place).glob("runs/*/checkpoints/step-*/part-*")
    )
    steps = {step for step, _ in copies}
    names = [part_name(number) for number in range(BLOCKS + 2)]
    return any(all(copies[step, name] >= 2 for name in names) for step in steps)


def check_history(history: dict[str, Any], expected: dict[int, float]) -> None:
    """Compare the record of the run with what one process has computed."""
    assert (history["step"], history["missing"]) == (STEPS, 0)
    assert history["samples"] == 8 * STEPS
    assert history["curves"][0]["name"] == "loss"
    assert history["curves"][0]["newest"] == pytest.approx(expected[STEPS], abs=1e-4)
    assert len(history["plans"]) >= 2, "the blocks were placed again"
    for plan in history["plans"]:
        assert plan["predicted_step_s"] > 0
    reasons = [plan["reason"] for plan in history["plans"]]
    shared = [each for each in reasons if "the exchange of gradients and the vote take" in each]
    assert shared, reasons
    # While all others are dead, one machine computes all blocks and exchanges nothing.
    assert all(each in shared or "computes all of it" in each for each in reasons), reasons


def test_dry_run_places_the_model_and_trains_nothing(folders: tuple[Path, Path]) -> None:
    project, marks = folders
    options, script = ("run", "--env", "agent", "--dry-run"), ("train.py", str(marks))
    with LocalAgents(3) as agents:
        agents.form()
        done = agents.type(0, *options, *script, folder=project, timeout=PATIENCE_S)
        again = agents.type(0, *options, "--json", *script, folder=project, timeout=PATIENCE_S)
    report = json.loads(again.stdout)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    text = " ".join(done.stdout.split())
    assert "The model has 5 blocks, which are its layers" in text
    assert "8 samples in 4 pieces, called micro-batches" in text
    assert "Predicted: " in text
    assert "FSDP2 over h0, h1 and h2" in text
    assert {stage["machine"] for stage in report["stages"]} <= {"h0", "h1", "h2"}
    assert report["step"]["step_s"] > 0
    assert all(machine["block_s"] > 0 for machine in report["machines"])
    assert list(marks.glob("losses-*")) == []
    assert list(marks.glob("*.safetensors")) == []
    names = sorted(path.name for path in project.iterdir())
    assert names == ["block_model.py", "limited_memory.py", "train.py"]


def train_alone(project: Path, marks: Path, *more: str) -> dict[str, torch.Tensor]:
    """Train in one process without an agent, and return the trained weights."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(project)])
    subprocess.run([sys.executable, "train.py", str(marks), *more], cwd=project, env=environment, check=True)
    return dict(load_file(marks / "alone.safetensors"))
