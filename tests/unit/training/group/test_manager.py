"""Group manager: status reports, and a clean exit while its threads still wait."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from barnraise.agent_client.run_requests import MOST_WORDS
from barnraise.training.group.agent_client import AgentGroupClient, WorkerId
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager

_WORKER = """
import atexit, sys, threading, time
from pathlib import Path

import torch

from barnraise.agent_client.run_requests import GroupResponse
from barnraise.checkpoint.serialization import FlatState
from barnraise.core.errors import OperationTimeout
from barnraise.training.group import manager as manager_module
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.group.manager import AgentGroupManager
from barnraise.training.recovery.live_recovery import StateDonor

waits = threading.Event()


class AbsentPeerStore:
    "Store of a cluster in which the joining worker never appears."

    def __init__(self, connect, scope, timeout_s):
        self.scope = scope

    def set(self, key, value, timeout_s):
        pass

    def wait(self, keys, timeout_s):
        waits.set()
        for _ in range(int(timeout_s * 1000)):
            time.sleep(0.001)
        raise OperationTimeout("no worker joined", late=())

    def missing(self, keys, timeout_s):
        return tuple(keys)

    def close(self):
        pass


manager_module.KvClient = AbsentPeerStore
manager = AgentGroupManager(WorkerId("run-1", 0, 1, Path(sys.argv[1]), "aa"))
manager._agent.generation = 1
manager._agent.response = GroupResponse(
    version=1, generation=1, is_member=True, rank=0, world=1, provisional=False, beginning=False,
    finished=False, broken=False, recovery_attempt=1, joining=1, sentence="",
)
atexit.register(manager.close)
donor = StateDonor(FlatState(b"", [torch.zeros(1)]), 1)
donor.start(manager.recovery_opener(1))
assert waits.wait(120)
print("the script is over", flush=True)
"""


def test_worker_waiting_for_joining_worker_exits_cleanly(tmp_path: Path) -> None:
    """Otherwise the last workers of a finished run would count as crashed, and the run would restart."""
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    words = [sys.executable, str(script), str(tmp_path)]
    environment = {**os.environ, "BARNRAISE_STATE_DIRECTORY": str(tmp_path / "state")}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment)
    assert "the script is over" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_session_at_exit_closes_group_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[object] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    manager, model = SingleWorkerManager(), torch.nn.Linear(2, 1)
    session = Session(manager, seed=0, unit=0, checkpoints=CheckpointManager(None, 60.0, 1))
    loader = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert manager.close in at_exit


def test_status_reports_are_sent_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step must not wait for many requests."""
    reports: list[tuple[bool, str]] = []
    monkeypatch.setattr(AgentGroupClient, "_poll", lambda self: None)
    client = AgentGroupClient(WorkerId("run-1", 0, 1, tmp_path, "aa"), lambda: None)

    def send_status() -> None:
        request = client._request(0, 0.0)
        reports.append((request.trained, request.words))

    monkeypatch.setattr(client, "_send_status", send_status)
    for words in ("pc", "pc", "x" * 500, ""):
        client.report_waiting(words)
        client.report_trained()
    assert reports == [(False, "pc"), (True, "pc"), (True, "x" * MOST_WORDS), (True, "")]


def test_pause_request_is_valid_for_one_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentGroupClient, "_poll", lambda self: None)
    client = AgentGroupClient(WorkerId("run-1", 0, 1, tmp_path, "aa"), lambda: None)
    client.generation = 3
    monkeypatch.setattr(client, "_send_status", lambda: None)
    client.request_pause(["ab" * 32], "its line is slow " * 100)
    request = client._request(0, 0.0)
    assert (request.generation, request.pauses) == (3, (b"\xab" * 32,))
    assert request.pauses_why.startswith("its line is slow")
    assert len(request.pauses_why) <= MOST_WORDS
    client.generation = 4
    assert (client._request(0, 0.0).pauses, client._request(0, 0.0).pauses_why) == ((), "")
