"""Failed exits of workers are kept in the record of a run, and each becomes one line."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from barnraise.identity import NodeKey
from barnraise.runs.control.failures import final_failure, merge_failures, refusal, root_failures, summarize
from barnraise.runs.record import (
    MAX_RECORDED_FAILURES,
    NodeReport,
    RecordedFailure,
    RunOutcome,
    RunRecord,
    WorkerFailure,
    decode_record,
    encode_record,
)

A, B = (NodeKey.generate().id.raw for _ in range(2))
TRACE = """\
epoch 3
Traceback (most recent call last):
  File "/home/anna/.local/state/barnraise/runs/train-fujr/folder/train.py", line 31, in <module>
    loss = step(x)
  File "/home/anna/.local/state/barnraise/runs/train-fujr/folder/parts/steps.py", line 7, in step
    raise ValueError("no such label")
  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 3, in f
    check()
ValueError: no such label
"""


def failure(start: int = 1, tail: str = TRACE, code: int = 1, signal: int = 0) -> WorkerFailure:
    return WorkerFailure(1, 0, start, code, signal, tail)


def report(*failures: WorkerFailure) -> NodeReport:
    return NodeReport(run="train-abcd", incarnation=bytes(16), serial=1, stage="running", failures=failures)


RECORD = RunRecord(order=b"order", signature=bytes(64))


@pytest.mark.parametrize(
    ("failed", "line"),
    [
        (failure(), "ValueError: no such label (parts/steps.py:7)"),
        (failure(tail="Traceback (most recent call last):\nKeyError: 'x'\n"), "KeyError: 'x'"),
        (failure(tail="", code=7), "exited with code 7"),
        (failure(tail=TRACE, code=0, signal=11), "killed by signal 11"),
        (failure(tail="... because memory was exhausted", code=0, signal=9), "out of memory"),
        (failure(tail=TRACE.replace("/", "\\")), "ValueError: no such label (parts/steps.py:7)"),
    ],
)
def test_failure_becomes_one_line(failed: WorkerFailure, line: str) -> None:
    assert summarize(failed).startswith(line)
    assert "\n" not in summarize(failed)


def test_failure_of_a_stopping_worker_counts_if_it_is_the_one_that_ended_the_run() -> None:
    stopping = replace(failure(), is_stopping=True)
    other = replace(failure(tail="Traceback (most recent call last):\nKeyError: 'x'\n"), is_stopping=True)
    ended = replace(RECORD, outcome=RunOutcome(code=1, sentence="it failed", tail=TRACE))
    stopped = replace(RECORD, outcome=RunOutcome(code=130, sentence="stopped from mac"))
    assert merge_failures(RECORD, {A: report(stopping)}) is RECORD
    assert merge_failures(stopped, {A: report(stopping)}) is stopped
    merged = merge_failures(ended, {A: report(stopping), B: report(other)})
    assert [item.node for item in merged.failures] == [A]


def test_reported_failures_are_added_once_and_survive_the_store() -> None:
    merged = merge_failures(RECORD, {A: report(failure(1)), B: report(failure(1), failure(4))})
    assert [(item.node, item.failure.start) for item in merged.failures] == sorted([(A, 1), (B, 1), (B, 4)])
    assert merge_failures(merged, {A: report(failure(1)), B: report()}) is merged
    assert decode_record(encode_record(merged)) == merged


def test_many_failures_keep_the_first() -> None:
    record = RECORD
    for start in range(40):
        record = merge_failures(record, {A: report(failure(start))})
    assert [item.failure.start for item in record.failures] == list(range(MAX_RECORDED_FAILURES))


def test_failures_of_one_machine_do_not_push_out_those_of_others() -> None:
    """A guest reports new failures without end, before an owner's worker fails."""
    record = RECORD
    for turn in range(4):
        flood = report(*(failure(start=8 * turn + number) for number in range(8)))
        record = merge_failures(record, {A: flood})
    assert len(record.failures) == MAX_RECORDED_FAILURES
    reports = {A: flood, B: report(failure(start=1), failure(start=2))}
    merged = merge_failures(record, reports)
    assert [item.failure.start for item in merged.failures if item.node == B] == [1, 2]
    assert [item.failure.start for item in merged.failures if item.node == A] == list(range(14))
    assert merge_failures(merged, reports) is merged, "the record does not change without end"


def test_failures_of_many_machines_keep_one_of_each() -> None:
    others = {bytes([number]) * 32: report(failure()) for number in range(MAX_RECORDED_FAILURES - 1)}
    flood = {b"\xff" * 32: report(*(failure(start=number) for number in range(8)))}
    merged = merge_failures(merge_failures(RECORD, flood), flood | others)
    assert len({item.node for item in merged.failures}) == MAX_RECORDED_FAILURES
    assert merge_failures(merged, flood | others) is merged


def test_failures_that_follow_from_another_are_no_roots() -> None:
    follower = RecordedFailure(B, failure(tail="... PeerLost: rank 0 is lost"))
    root = RecordedFailure(A, failure())
    assert root_failures([follower, root]) == [root]
    assert root_failures([follower]) == [follower], "else nothing would be shown"
    assert root_failures([follower], has_succeeded=True) == [], "it lost a machine, and went on"
    assert root_failures([follower, root], has_succeeded=True) == [root]
    assert root_failures([]) == []


def test_final_failure_is_the_one_that_the_outcome_names() -> None:
    first, second = (RecordedFailure(node, failure(tail=f"{TRACE}")) for node in (A, B))
    outcome = RunOutcome(code=1, sentence="", rank=1, node=A)
    record = replace(RECORD, failures=(first, second), outcome=outcome)
    assert final_failure(record) == first
    assert final_failure(replace(record, outcome=replace(outcome, code=0))) is None
    assert final_failure(replace(record, outcome=None)) is None
    assert final_failure(replace(record, failures=())) is None


def test_error_of_ours_is_summarized_without_its_class() -> None:
    trace = TRACE.replace(
        "ValueError: no such label", "barnraise.core.errors.RunError: [run] there is no task"
    )
    assert summarize(failure(tail=f"{trace}  -> Did you mean it?\n")).startswith("there is no task (")


def test_refusal_is_the_sentence_of_the_refused_worker() -> None:
    trace = "Traceback (most recent call last):\n  File 'train.py', line 3\n"
    line = "barnraise.core.errors.WorkerRefused: [worker-refused] pc is refused: its lr is 0.2"
    assert refusal(f"epoch 1\n{trace}{line}\n  -> Fix it.\n") == "pc is refused: its lr is 0.2"
    assert refusal(f"{trace}ValueError: {line}\n") == ""
    assert refusal(line) == ""
