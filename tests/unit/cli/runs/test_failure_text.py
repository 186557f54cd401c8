"""Failures at the end of a run: each error once, with all its machines."""

from __future__ import annotations

import pytest

from barnraise.agent_client.run_requests import FailureRow, RunRow
from barnraise.cli.runs.failure_text import (
    failure_hint,
    final_line,
    is_traceback_shown,
    news_of,
    restarted_lines,
)

SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (train.py:13)"
MACHINES = ("mac", "pc", "nas")


def failure(rank: int, summary: str = SHAPES, **more: int) -> FailureRow:
    return FailureRow(MACHINES[rank], rank, summary, **more)


def ended(*failures: FailureRow, code: int = 1, rank: int | None = None) -> RunRow:
    return RunRow(
        run="train-abcd", title="", command=("train.py",), by="mac", at=0, phase="ended", generation=1,
        version=1, sentence="rank 1 on pc exited with code 1", machines=MACHINES, code=code,
        failures=failures, failed_rank=rank, failed_on=MACHINES[rank] if rank is not None else "",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "where"), [((0, 1, 2), "all 3 machines"), ((1, 2), "pc and nas"), ((1,), "pc")]
)
def test_final_line_names_the_error_once_with_its_machines(ranks: tuple[int, ...], where: str) -> None:
    row = ended(*map(failure, ranks), rank=1)
    assert final_line(row) == f"run train-abcd failed: {SHAPES}, on {where}"
    assert restarted_lines(row) == []


def test_news_of_a_failed_run_are_its_error_and_no_rank() -> None:
    assert news_of(ended(failure(1), rank=1)) == f"{SHAPES}, on pc"
    assert news_of(ended(failure(1), rank=1, code=0)) == "rank 1 on pc exited with code 1"


def test_final_line_of_killed_worker_is_the_sentence_of_the_run() -> None:
    row = ended(failure(1, "killed by signal 9", signal=9), code=137, rank=1)
    assert final_line(row) == "run train-abcd: rank 1 on pc exited with code 1"


def test_restarted_lines_group_machines_and_leave_out_the_last_failure() -> None:
    other = "ValueError: no such label (train.py:31)"
    row = ended(failure(1, other), failure(2, other), failure(1), failure(1), rank=1)
    assert restarted_lines(row) == [f"pc, nas: {other}; restarted", f"pc: {SHAPES}; restarted"]
    assert final_line(row) == f"run train-abcd failed: {SHAPES}, on pc"


def test_restarted_lines_of_a_run_that_was_stopped_or_finished_have_all_failures() -> None:
    for code in (0, 130):
        row = ended(failure(1), code=code)
        assert restarted_lines(row) == [f"pc: {SHAPES}; restarted"]
        assert final_line(row).endswith("exited with code 1")


def test_script_that_exits_with_the_code_of_a_stop_has_failed() -> None:
    assert ended(code=130).was_stopped
    row = ended(failure(1, "exited with code 130"), code=130, rank=1)
    assert not row.was_stopped
    assert final_line(row) == "run train-abcd failed: exited with code 130, on pc"


def test_traceback_is_shown_if_a_worker_with_shown_output_had_the_same_error() -> None:
    assert is_traceback_shown(ended(failure(0), failure(1), rank=1), all_output=False)
    assert not is_traceback_shown(ended(failure(1), rank=1), all_output=False)
    assert is_traceback_shown(ended(failure(1), rank=1), all_output=True)
    assert not is_traceback_shown(ended(failure(0, "ValueError: x"), failure(1), rank=1), all_output=False)


def test_hint_for_input_of_a_keyboard() -> None:
    eof = "EOFError: EOF when reading a line (train.py:2)"
    assert "no keyboard" in failure_hint(ended(failure(0, eof), rank=0))
    assert failure_hint(ended(failure(0), rank=0)) == ""
    assert failure_hint(ended(failure(0, eof), code=0)) == ""
