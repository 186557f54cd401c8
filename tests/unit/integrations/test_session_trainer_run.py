"""Trainer in a run of three agents: a worker is killed, and the losses are those of the plain Trainer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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
from benchmarks.hub.process import free_port

pytest.importorskip("transformers", reason="needs transformers")

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(600)]
PATIENCE_S = 240.0
MODEL = Path(__file__).with_name("tiny_llama.py")  # each machine gets it with the script
PROGRAM = """\
import json, time
import torch
from transformers import TrainerCallback
from tiny_llama import arguments, collate, logged, sentences, tiny_llama

torch.set_num_threads(1)

class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(PAUSE)

trainer = Trainer(
    model=tiny_llama(), args=arguments("out", num_train_epochs=8), train_dataset=sentences(),
    data_collator=collate, callbacks=[Slow()],
)
trainer.train()
trainer.save_model("model")
print("log", json.dumps(logged(trainer)), flush=True)
"""


def program(*, is_shared: bool) -> str:
    """Return the script; for the session only the import of Trainer differs."""
    source = "barnraise.integrations.transformers" if is_shared else "transformers"
    text = PROGRAM.replace("PAUSE", "0.3" if is_shared else "0")
    return f"from {source} import Trainer\n{text}"


def wait_until(truth: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not truth():
        assert time.monotonic() < deadline, f"it did not happen that {what}"
        time.sleep(0.2)


def commits(trace: Path) -> list[list[str]]:
    """Return the words of each line of the trace: time, step, generation, rank, world, hash, process."""
    return [line.split() for line in trace.read_text().splitlines()] if trace.exists() else []


def members(node: SelfTestNode) -> int:
    return sum(row.seniority is not None for row in node.ask(StatusRequest(), StatusResponse, 5.0).nodes)


def train_with_a_kill(nodes: list[SelfTestNode], workspace: Path) -> str:
    """Return the output of the run."""
    first, trace = nodes[0], workspace / "trace"
    for node in nodes:
        wait_until(node.answers, f"the agent of {node.name} answers")
        node.ask(RenameRequest(node.name), RequestDone)
    for node in nodes[1:]:
        code = first.ask(PairRequest(), OfferResponse).code
        node.ask(JoinClusterRequest(code, at=f"127.0.0.1:{first.port}"), RequestDone)
    wait_until(lambda: members(first) == 3, "all three agree")
    folder = workspace / "project"
    folder.mkdir()
    (folder / "train.py").write_text(program(is_shared=True))
    shutil.copy(MODEL, folder)
    words = ["run", "--set", f"BARNRAISE_TRACE_COMMITS={trace}", "train.py"]
    with open(workspace / "log", "wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "barnraise.cli.main", *words],
            cwd=folder,
            env=first.environment,
            stdout=log,
            stderr=log,
        )
    try:

        def output() -> str:
            return (workspace / "log").read_text(errors="replace")

        wait_until(
            lambda: (
                any(int(row[1]) >= 4 and row[4] == "3" for row in commits(trace))
                or running.poll() is not None
            ),
            "three workers train",
        )
        assert running.poll() is None, output()
        victim = next(row for row in reversed(commits(trace)) if row[3] == "2")
        os.kill(int(victim[6]), signal.SIGKILL)
        assert running.wait(PATIENCE_S) in (0, 3), output()
        assert any(row[4] == "2" for row in commits(trace)), "nothing happened without the killed worker"
        return output()
    finally:
        running.kill()


def log_in(output: str) -> list[dict[str, float]]:
    lines = [line.partition("log ")[2] for line in output.splitlines() if "log [" in line]
    assert lines, output
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def test_killed_worker_does_not_change_the_losses(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    discovery = free_port()
    nodes = [SelfTestNode(name, tmp_path, discovery) for name in NAMES]
    try:
        shared = log_in(train_with_a_kill(nodes, tmp_path))
    finally:
        for node in nodes:
            node.end()
    (tmp_path / "alone.py").write_text(program(is_shared=False))
    shutil.copy(MODEL, tmp_path)
    alone = subprocess.run(
        [sys.executable, "alone.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True
    )
    expected = log_in(alone.stdout)
    assert len(shared) == len(expected)
    for one, other in zip(expected, shared, strict=True):
        assert other == pytest.approx(one, rel=1e-6)
