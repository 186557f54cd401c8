"""Tests of the end of a worker process; they also run the branch for macOS here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from barnraise.agent.supervisor import process as process_module
from barnraise.agent.supervisor.process import ExitOutcome, WorkerProcess

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups are Unix's")


@pytest.mark.parametrize(
    ("program", "succeeds", "outcome"),
    [
        ("pass", True, ExitOutcome(0, None)),
        ("raise SystemExit(3)", False, ExitOutcome(3, None)),
        ("import os; os.kill(os.getpid(), 9)", False, ExitOutcome(None, 9)),
    ],
)
def test_exit_is_seen_where_waitid_is_missing(
    program: str, succeeds: bool, outcome: ExitOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = WorkerProcess(subprocess.Popen([sys.executable, "-c", program], start_new_session=True), None)
    monkeypatch.setattr(process_module.sys, "platform", "darwin")
    monkeypatch.delattr(os, "waitid")
    assert worker.wait_exit() is succeeds
    assert worker.reap() == outcome
