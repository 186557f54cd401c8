"""States that workers report to their agent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from barnraise.agent.runs.worker_group import WorkerGroup, log_path
from barnraise.agent.supervisor.log_file import LogWriter
from barnraise.agent.supervisor.messages import WorkerExited, WorkerStarted
from barnraise.agent_client.run_requests import GroupRequest
from barnraise.identity import NodeKey
from barnraise.runs.record import RunRecord, WorkerSlot

TRACE = """\
epoch 1
Traceback (most recent call last):
  File "train.py", line 28, in <module>
    raise ValueError('no such label')
ValueError: no such label
"""

STEP_FAILED = "barnraise.core.errors.StepFailed: [step-failed] step 2 was applied only in part"


def _group(config: Any = None) -> WorkerGroup:
    slots = (WorkerSlot(NodeKey.generate().id.raw, 0, "cpu", 3),)
    record = RunRecord(order=b"", signature=bytes(64), slots=slots)
    return WorkerGroup(config, record, [0], 3, lambda: None, lambda text: None)


@pytest.mark.parametrize(
    ("tail", "failures"),
    [
        (TRACE, [(1, 0)]),
        ("epoch 1\n", []),
        (TRACE + "continues with the next epoch\n", []),
        (TRACE.replace("ValueError: no such label", "barnraise.core.errors.PeerLost: pc"), []),
        (TRACE.replace("ValueError: no such label", f"{STEP_FAILED}\n  -> Let it end."), [(1, 0)]),
    ],
)
def test_evicted_worker_that_is_killed_has_failed_if_its_output_ends_with_an_exception(
    tail: str, failures: list[tuple[int, int]]
) -> None:
    group = _group()
    group._evicted = {0}
    group._on_exit(WorkerExited(0, None, 9, 1.0, tail.encode()))
    assert [(failure.code, failure.signal) for failure in group.failures] == failures


def test_set_state_of_old_request_keeps_newer_facts() -> None:
    group = _group()
    early = GroupRequest("train-abcd", 0, 3)
    late = GroupRequest("train-abcd", 0, 3, trained=True, words="pc")
    assert not group.update_from(early)
    assert group.update_from(late)
    assert not group.update_from(late), "it is known"
    group.set_state("waiting", early)  # it is answered after the other
    assert (group.states[0].state, group.states[0].trained, group.states[0].wait_reason) == (
        "waiting",
        True,
        "pc",
    )
    assert group.update_from(early)
    assert (group.states[0].trained, group.states[0].wait_reason) == (True, "")


def test_lines_as_main_worker_begin_after_what_it_printed_before(tmp_path: Path) -> None:
    group = _group(SimpleNamespace(home=tmp_path))
    writer = LogWriter(log_path(tmp_path, 3, 0))
    writer.write(b"epoch 0\nepoch 1\n")
    request = GroupRequest("train-abcd", 0, 3)
    assert group.mark_main(request)
    writer.write(b"epoch 2\n")
    assert not group.mark_main(request), "it is main already"
    assert group.states[0].main_offset == 16


def test_worker_that_starts_in_a_frozen_group_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _group()
    group.freeze()  # the supervisor has not started it yet
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as worker:
        try:
            group._on_event(WorkerStarted(0, worker.pid))
            deadline = time.monotonic() + 10
            while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:
                assert time.monotonic() < deadline
            assert group.thaw()
            while psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED:
                assert time.monotonic() < deadline
        finally:
            worker.kill()
    assert not group.thaw(), "it is not frozen any more"
