"""Files of jobs, as ``barnraise queue results`` fetches them."""

from __future__ import annotations

from pathlib import Path

import pytest

from barnraise.agent_client.queue.requests import JobRow, ListJobsRequest, QueueResponse
from barnraise.agent_client.run_requests import ResultsResponse
from barnraise.cli.queue import results


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "_POLL_S", 0.0)


def row(number: int, state: str = "done", **fields: object) -> JobRow:
    return JobRow(
        job=number,
        state=state,  # type: ignore[arg-type]
        by="mac",
        at=0.0,
        title="train",
        command=("train.py",),
        each="device",
        run=f"train-q{number}-1",
        machines=("pc",),
        **fields,  # type: ignore[arg-type]
    )


def play(monkeypatch: pytest.MonkeyPatch, *answers: list[JobRow]) -> None:
    """Let the agent answer with one table after the other."""
    tables = iter(answers)

    def ask(request: object, expected: object, timeout_s: float = 0.0) -> object:
        return QueueResponse(jobs=tuple(next(tables))) if isinstance(request, ListJobsRequest) else None

    monkeypatch.setattr(results, "ask", ask)


def test_files_that_stayed_on_a_machine_are_not_reported_as_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, [row(1, results_note="the results stay in /runs/folder: they are too large"), row(2)])
    assert results.bring((), waits=False) == 1
    printed = capsys.readouterr().err
    assert "job 1 on pc: the results stay in /runs/folder: they are too large" in printed
    assert "job 2 wrote no file" in printed


def test_files_that_were_left_out_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(request: object, expected: object, timeout_s: float = 0.0) -> object:
        if isinstance(request, ListJobsRequest):
            return QueueResponse(jobs=(row(1, has_results=True),))
        return ResultsResponse(bytes(32), "the results lack out/checkpoint-100")

    monkeypatch.setattr(results, "ask", ask)
    monkeypatch.setattr(results, "unpack_into", lambda *_: 3)
    assert results.bring((), waits=False) == 0
    printed = capsys.readouterr().err
    assert "job 1 on pc: the results lack out/checkpoint-100" in printed
    assert "job 1 wrote 3 files" in printed


def test_wait_goes_on_when_a_job_that_was_brought_leaves_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, [row(1), row(2, "running")], [row(2, "running")], [row(2)])
    assert results.bring((), waits=True) == 0
    assert "job 2 wrote no file" in capsys.readouterr().err


def test_job_that_left_the_list_before_it_was_brought_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, [row(1, "running"), row(2, "running")], [row(2)])
    assert results.bring((), waits=True) == 1
    assert "job 1 is no longer in the list" in capsys.readouterr().err


def test_empty_queue_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    play(monkeypatch, [])
    assert results.bring((), waits=True) == 0
    assert "the queue is empty" in capsys.readouterr().err


def test_failed_job_names_its_error_and_the_command_for_its_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, [row(1, "failed", why="ValueError: no label, on pc")])
    assert results.bring((), waits=False) == 1
    printed = capsys.readouterr().err
    assert "job 1 failed: ValueError: no label, on pc" in printed
    assert "barnraise logs train-q1-1" in printed
