"""Trainers in runs of three agents: a worker is killed, and the losses are those of the plain trainers.

The plain script differs in one line: it imports Trainer or SFTTrainer from its own library.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from barnraise.agent_client.cluster_requests import (
    JoinClusterRequest,
    OfferResponse,
    PairRequest,
    RenameRequest,
    RequestDone,
    StatusRequest,
    StatusResponse,
)
from barnraise.cli.machine.self_test import NAMES, SelfTestNode
from benchmarks.agents.commits import Commit, judge, read_commits
from benchmarks.hub.process import free_port
from tests.repository import ROOT

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("trl", reason="needs trl")

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(1500)]
PATIENCE_S = 600.0
STEPS_BEFORE = 3  # the kill
LLAMA = Path(__file__).with_name("tiny_llama.py")
TRAINER = """\
from barnraise.integrations.transformers import Trainer
from tiny_llama import arguments, collate, sentences, tiny_llama

trainer = Trainer(
    model=tiny_llama(), args=arguments("out", num_train_epochs=6), train_dataset=sentences(),
    data_collator=collate,
)
result = trainer.train()
if trainer.is_world_process_zero():
    print(f"{result.global_step} steps, mean loss {result.training_loss:.12f}")
trainer.save_model("model")
"""
# Steps are slow until a worker is killed, slower until it is back, and then fast.
SLOW = """\
import os, time
from functools import wraps
from transformers import LlamaModel

forward = LlamaModel.forward

@wraps(forward)
def slow_forward(*args, **kwargs):
    end = time.monotonic() + (6.0 if os.path.exists({killed!r}) else 0.5)
    while time.monotonic() < end and not os.path.exists({hurry!r}):
        time.sleep(0.05)
    return forward(*args, **kwargs)

LlamaModel.forward = slow_forward
"""


class Case(NamedTuple):
    """A script, and how far its results may be from those of one machine.

    ``loss``: relative, of the mean loss over all steps. ``weights``: absolute, of what it saves.
    """

    script: str
    files: tuple[Path, ...]
    saved: str
    loss: float
    weights: float
    arguments: tuple[str, ...] = ()


def example(name: str, saved: str, *arguments: str) -> Case:
    """Return the case of an example in float32: Adam makes rounding errors of small gradients larger."""
    script = (ROOT / "examples" / name).read_text("utf-8")
    file = f"{saved}/adapter_model.safetensors"
    return Case(script, (ROOT / "LICENSE",), file, 1e-4, 1e-3, ("--small", *arguments))


CASES = {
    # In float64, except for the norms of Llama, which compute in float32.
    "trainer": Case(TRAINER, (LLAMA,), "model/model.safetensors", 1e-7, 1e-6),
    "finetune_llm": example("finetune_llm.py", "adapter", "--text", "LICENSE"),
    "sft_trainer": example("sft_trainer.py", "sft-adapter"),
}
UNITS = 8  # micro-batches of a step


def wait_until(truth: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not truth():
        assert time.monotonic() < deadline, f"it did not happen that {what}"
        time.sleep(0.1)


def members(node: SelfTestNode) -> int:
    return sum(row.seniority is not None for row in node.ask(StatusRequest(), StatusResponse, 5.0).nodes)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SelfTestNode]]:
    workspace = tmp_path_factory.mktemp("agents")
    (workspace / "config.toml").write_text("[link]\nsilence_s = 120\n")  # a busy machine is not a lost one
    discovery = free_port()
    started = [SelfTestNode(name, workspace, discovery) for name in NAMES]
    first = started[0]
    try:
        for node in started:
            wait_until(node.answers, f"the agent of {node.name} answers")
            node.ask(RenameRequest(node.name), RequestDone)
        for node in started[1:]:
            code = first.ask(PairRequest(), OfferResponse).code
            node.ask(JoinClusterRequest(code, at=f"127.0.0.1:{first.port}"), RequestDone)
        wait_until(lambda: members(first) == 3, "all three agree")
        yield started
    finally:
        for node in started:
            node.end()


def write_project(folder: Path, case: Case, script: str) -> list[str]:
    """Write the script with what it reads, and return its command line."""
    folder.mkdir()
    (folder / "train.py").write_text(script, "utf-8")
    for file in case.files:
        shutil.copy(file, folder)
    return ["train.py", *case.arguments]


def kill_and_watch(
    running: subprocess.Popen[bytes], workspace: Path, read: Callable[[], str]
) -> list[Commit]:
    """Kill the worker of rank 2 in the middle, wait until it is back, and return all commits."""
    trace = workspace / "trace"

    def has(truth: Callable[[Commit], bool]) -> bool:
        return any(truth(commit) for commit in read_commits(trace)) or running.poll() is not None

    def is_victim(commit: Commit) -> bool:
        return commit.world == 3 and commit.rank == 2 and commit.step >= STEPS_BEFORE

    wait_until(lambda: has(is_victim), "three workers train")
    assert running.poll() is None, read()
    victim = next(commit for commit in read_commits(trace) if is_victim(commit))
    os.kill(victim.pid, signal.SIGKILL)
    (workspace / "killed").touch()
    known = {commit.pid for commit in read_commits(trace)}

    def is_back(commit: Commit) -> bool:
        return commit.pid not in known and commit.world > 1

    wait_until(lambda: has(is_back), "a new worker trains with the others")
    (workspace / "hurry").touch()
    assert running.wait(PATIENCE_S) == 0, read()
    commits = read_commits(trace)
    after = [commit for commit in commits if commit.step > victim.step]
    assert victim.pid not in {commit.pid for commit in after if commit.step > victim.step + 1}
    assert any(commit.world < 3 for commit in after), "the others trained without it"
    assert any(is_back(commit) for commit in after), "it came back as a new process"
    return commits


def stop(running: subprocess.Popen[bytes]) -> None:
    """Stop a run that a failed test leaves behind, so that the next test does not share the processors."""
    if running.poll() is None:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(90)
        finally:
            running.kill()


def run_with_a_kill(case: Case, first: SelfTestNode, workspace: Path) -> tuple[str, list[Commit]]:
    """Return the output of the run, and the commits of all its workers."""
    output = workspace / "output"
    slow = SLOW.format(killed=str(workspace / "killed"), hurry=str(workspace / "hurry"))
    words = write_project(workspace / "run", case, slow + case.script)
    variables = {
        "BARNRAISE_TRACE_COMMITS": workspace / "trace",
        "BARNRAISE_LINK_SILENCE_S": 120,
        "OMP_NUM_THREADS": 1,
    }
    options = [word for name, value in variables.items() for word in ("--set", f"{name}={value}")]
    with open(output, "wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "barnraise.cli.main", "run", *options, *words],
            cwd=workspace / "run",
            env=first.environment,
            stdout=log,
            stderr=log,
        )

    def read() -> str:
        return output.read_text("utf-8", errors="replace")

    try:
        commits = kill_and_watch(running, workspace, read)
    finally:
        stop(running)
    return read(), commits


@contextmanager
def started_alone(case: Case, workspace: Path) -> Iterator[Callable[[], str]]:
    """Start the same script with the plain trainer. Yield a function that returns its output."""
    source = r"from barnraise\.integrations\.transformers import (\w+)"
    homes = {"Trainer": "transformers", "SFTTrainer": "trl"}
    plain, changed = re.subn(source, lambda match: f"from {homes[match[1]]} import {match[1]}", case.script)
    assert changed == 1
    assert "import barnraise" not in plain
    words, output = write_project(workspace / "alone", case, plain), workspace / "alone-output"
    with open(output, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=workspace / "alone",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )

    def result() -> str:
        code, text = process.wait(PATIENCE_S), output.read_text("utf-8", errors="replace")
        assert code == 0, text
        return text

    try:
        yield result
    finally:
        process.kill()
        process.wait()


def mean_loss(output: str) -> tuple[int, float]:
    """Return the steps of a training, and the mean of their losses."""
    match = re.search(r"(\d+) steps, mean loss ([\d.]+)", output)
    assert match is not None, output
    return int(match[1]), float(match[2])


def logged_losses(output: str) -> list[float]:
    """Return the losses in the log, which have four digits."""
    return [float(text) for text in re.findall(r"'loss': '?([\d.]+)", output)]


@pytest.mark.parametrize("name", CASES)
def test_killed_worker_does_not_change_the_losses(
    name: str, nodes: list[SelfTestNode], tmp_path: Path
) -> None:
    case = CASES[name]
    with started_alone(case, tmp_path) as result_alone:
        shared, commits = run_with_a_kill(case, nodes[0], tmp_path)
        alone = result_alone()
    judgement = judge(commits, UNITS)
    assert judgement.violations == 0, judgement
    assert judgement.steps_not_judged <= 1, "only the killed worker may not have written down a step"
    (count, loss), (expected_count, expected_loss) = mean_loss(shared), mean_loss(alone)
    assert count == expected_count == judgement.steps
    assert loss == pytest.approx(expected_loss, rel=case.loss)
    assert len(logged_losses(alone)) > 2
    assert logged_losses(shared) == pytest.approx(logged_losses(alone), rel=1e-3)
    (saved,) = tmp_path.glob(f"run/barnraise-runs/*/{case.saved}")
    tensors, expected = load_file(saved), load_file(tmp_path / "alone" / case.saved)
    assert sorted(tensors) == sorted(expected)
    for key, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=case.weights)
