"""The line about what a run waits for names the machines, and only what is known."""

from __future__ import annotations

from barnraise.agent_client.run_requests import PartRow, RunRow, WatchResponse, WorkerRow
from barnraise.cli.runs.progress.waiting_line import awaited, stall_reason, waiting_line


def response(
    phase: str, workers: tuple[WorkerRow, ...] = (), parts: tuple[PartRow, ...] = ()
) -> WatchResponse:
    row = RunRow(
        run="train-abcd", title="", command=("t.py",), by="mac", at=0, phase=phase, generation=1, version=1,
        sentence="", machines=("mac", "pc"),
    )  # fmt: skip
    return WatchResponse(row=row, parts=parts, workers=workers)


def workers(*sessions: bool, words: str = "", state: str = "running") -> tuple[WorkerRow, ...]:
    return tuple(
        WorkerRow(rank=rank, name=name, device="cpu", state=state, words=words, has_session=has_session)
        for rank, (name, has_session) in enumerate(zip(("mac", "pc"), sessions, strict=True))
    )


def test_preparing_run_names_what_each_machine_does() -> None:
    parts = (
        PartRow(name="mac", stage="ready"),
        PartRow(name="pc", stage="fetching", done_bytes=10 << 20, all_bytes=300 << 20),
        PartRow(name="nas", stage="building", words="Downloading torch"),
    )
    text = awaited(response("preparing", parts=parts), has_output=False)
    assert text == "pc receives 10 MiB of 300 MiB; nas: Downloading torch"
    ready = awaited(response("preparing", parts=parts[:1]), has_output=False)
    assert ready == "all machines are ready, starting the workers"


def test_started_run_names_the_machines_where_the_script_starts() -> None:
    assert awaited(response("running", workers(False, False)), has_output=False) == (
        "the script starts on mac, pc"
    )
    assert awaited(response("running", workers(True, False)), has_output=True) == (
        "waiting for the first step: the script starts on pc"
    )
    assert awaited(response("running", workers(True, True)), has_output=True) == "waiting for the first step"
    waits = workers(True, True, words="the checkpoint of step 60")
    assert awaited(response("running", waits[:1]), has_output=False) == (
        "waiting for the first step; mac waits for the checkpoint of step 60"
    )


def test_script_without_session_runs_once_it_prints() -> None:
    assert awaited(response("running", workers(False, False)), has_output=True) == (
        "the script runs on 2 machines"
    )


def test_stopping_run_names_the_workers_that_are_left() -> None:
    assert awaited(response("stopping", workers(True, True)), has_output=True) == (
        "waiting for the worker to end on mac, pc"
    )
    ended = workers(True, True, state="ended")
    assert awaited(response("stopping", ended), has_output=True) == "collecting the results"
    assert awaited(response("ended", ended), has_output=True) == ""


def test_waiting_line_is_cut_before_the_seconds() -> None:
    assert waiting_line("receiving", 3.2, 20) == "receiving (4 s)"
    assert waiting_line("receiving the files", 3.2, 20) == "receiving t... (4 s)"


def test_stalled_group_names_what_its_workers_wait_for() -> None:
    assert stall_reason(workers(True, True)) == ""
    assert stall_reason(workers(False, False)) == ""
    assert stall_reason(workers(True, False)).startswith("the script starts on ")
    reason = stall_reason(workers(True, True, words="the checkpoint, 3 of 40 MiB"))
    assert "waits for the checkpoint, 3 of 40 MiB" in reason
