"""`barnraise ps RUN` says what a worker waits for."""

from __future__ import annotations

from barnraise.agent_client.run_requests import RunRow, WatchResponse, WorkerRow
from barnraise.cli.runs.runs import describe


def test_waiting_worker_names_what_it_waits_for() -> None:
    row = RunRow(
        run="train-abcd",
        title="train",
        command=("train.py",),
        by="mac",
        at=0.0,
        phase="running",
        generation=2,
        version=5,
        sentence="",
        machines=("mac",),
    )
    words = "pc, with the checkpoint of step 60"
    waits = WorkerRow(rank=0, name="mac", device="cpu", state="running", words=words)
    works = WorkerRow(rank=1, name="box", device="cpu", state="running")
    lines = describe(WatchResponse(row=row, parts=(), workers=(waits, works))).splitlines()
    assert lines[-2].endswith("running, waits for pc, with the checkpoint of step 60")
    assert lines[-1].endswith("running")
