"""Records of jobs: what people change, and what never changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent_client.queue.requests import JobOptions
from barnraise.agent_client.run_options import RunOptions, RunProgram
from barnraise.core.errors import ProtocolError, RunError
from barnraise.identity import NodeKey
from barnraise.runs.queue.job import (
    JobAttempt,
    KnownJob,
    can_forget,
    cancel_job,
    changed_job,
    check_after,
    check_successor,
    clear_job,
    decode_job,
    encode_job,
    end_forgotten,
    move_job,
    new_job,
    pause_job,
    prioritize_job,
    queue_order,
    supersedes,
)
from barnraise.runs.queue.spec import JobSpec, sign_job

KEY = NodeKey.generate()


def job(
    number: int,
    *,
    priority: int = 0,
    nodes: tuple[bytes, ...] = (),
    run_options: RunOptions = RunOptions(title="train"),  # noqa: B008  # it is frozen
    **options: Any,
) -> KnownJob:
    spec = JobSpec(
        job=number,
        by=KEY.id.raw,
        at=0.0,
        program=RunProgram(command=("train.py",), folder=bytes(32)),
        options=run_options,
        job_options=JobOptions(**options),
        nodes=nodes,
    )
    return KnownJob(spec, new_job(sign_job(spec, KEY), priority), nodes)


def table(*jobs: KnownJob) -> dict[int, KnownJob]:
    return {item.number: item for item in jobs}


def order(jobs: Mapping[int, KnownJob]) -> list[int]:
    return [item.number for item in queue_order(jobs.values())]


def moved(jobs: dict[int, KnownJob], number: int, before: int = 0, *, to_end: bool = False) -> list[int]:
    record = move_job(jobs, number, before, to_end=to_end)
    assert record is not None
    return order({**jobs, number: replace(jobs[number], record=record)})


def test_record_survives_encoding() -> None:
    record = job(7).record
    assert decode_job(encode_job(record)) == record


def test_jobs_start_by_priority_and_then_in_the_order_of_their_addition() -> None:
    assert order(table(job(1), job(2, priority=3), job(3))) == [2, 1, 3]


def test_moved_job_starts_before_the_named_one() -> None:
    jobs = table(job(1), job(2), job(3), job(4))
    assert moved(jobs, 4, before=2) == [1, 4, 2, 3]
    assert moved(jobs, 3) == [3, 1, 2, 4]
    assert moved(jobs, 1, to_end=True) == [2, 3, 4, 1]
    assert move_job(table(job(1)), 1, 0) is None


def test_moved_job_gets_the_priority_of_its_new_place() -> None:
    jobs = table(job(1, priority=5), job(2, priority=5), job(3))
    assert moved(jobs, 3, before=2) == [1, 3, 2]
    assert moved(jobs, 1, to_end=True) == [2, 3, 1]


def test_move_between_the_same_jobs_ends_with_an_error_and_not_with_a_wrong_order() -> None:
    jobs = table(*(job(number) for number in range(1, 30)))
    moves = 0
    for number in range(3, 30):
        try:
            record = move_job(jobs, number, 2)
        except RunError as error:
            assert "no place left" in error.message  # noqa: PT017  # after some moves
            break
        assert record is not None
        jobs[number] = replace(jobs[number], record=record)
        moves += 1
        assert order(jobs)[moves : moves + 2] == [number, 2]
    assert moves == 20


def test_job_that_runs_cannot_be_moved() -> None:
    running = replace(job(1), record=replace(job(1).record, state="running"))
    with pytest.raises(RunError, match="job 1 is running"):
        move_job(table(running), 1, 0)
    with pytest.raises(RunError, match="job 1 is running"):
        prioritize_job(table(running), 1, 5)
    with pytest.raises(RunError, match="there is no job 9"):
        move_job(table(job(1), job(2)), 1, 9)


def test_cancelled_job_stays_cancelled() -> None:
    attempt = JobAttempt(number=1, nodes=(bytes(32),))
    running = replace(job(1).record, state="running", attempts=(attempt,))
    cancelled = cancel_job(running, "mac")
    assert cancelled is not None
    assert (cancelled.state, cancelled.attempts[0].end, cancelled.version) == ("cancelled", "stopped", 2)
    assert cancel_job(cancelled, "mac") is None
    assert pause_job(cancelled, is_paused=True) is None
    with pytest.raises(ProtocolError, match="cancelled cannot become done"):
        check_successor(replace(cancelled, version=9, state="done"), cancelled)
    check_successor(replace(cancelled, version=9, is_cleared=True), cancelled)


def test_two_jobs_of_one_number_are_rejected() -> None:
    with pytest.raises(ProtocolError, match="two different jobs"):
        check_successor(job(1, retries=7).record, job(1).record)


def test_only_ended_jobs_are_cleared_and_forgotten() -> None:
    assert clear_job(job(1).record) is None
    done = {
        number: replace(job(number), record=replace(job(number).record, state="done")) for number in (1, 2, 3)
    }
    jobs = {**done, 4: job(4, after=(2,))}
    assert can_forget(jobs, keep=1) == [1, 3]
    assert can_forget(done, keep=0) == [1, 2], "the newest number stays, so that it is not used again"


def test_job_that_ended_last_and_one_that_awaits_results_are_kept() -> None:
    def done(number: int, at: float, *, is_collected: bool = True) -> KnownJob:
        record = replace(job(number).record, state="done", is_collected=is_collected, ended_at=at)
        return replace(job(number), record=record)

    jobs = table(done(1, 9.0), done(2, 3.0), done(3, 1.0, is_collected=False), done(4, 2.0), done(5, 4.0))
    assert can_forget(jobs, keep=2) == [4, 2]


def test_end_of_a_forgotten_job_replaces_every_record_that_goes_on() -> None:
    record = replace(job(1).record, version=7)
    attempt = JobAttempt(number=1, nodes=(bytes(32),))
    for known in (record, replace(record, state="running", attempts=(attempt,))):
        end = end_forgotten(known)
        assert supersedes(end, known)
        check_successor(end, known)
        assert (end.state, end.is_cleared, end.attempt) == ("cancelled", True, None)


def test_job_after_an_unknown_one_is_refused() -> None:
    check_after({1, 2}, (2,))
    with pytest.raises(RunError, match="there is no job 3"):
        check_after({1, 2}, (3,))


def test_newer_version_replaces_an_older_one() -> None:
    record = job(1).record
    newer = changed_job(record, priority=1)
    assert supersedes(newer, record)
    assert not supersedes(record, newer)
    assert not supersedes(record, record)


def test_end_replaces_a_newer_record_of_a_job_that_goes_on() -> None:
    record = job(1).record
    cancelled = cancel_job(record, "mac")
    assert cancelled is not None
    other_history = replace(record, version=9, priority=1)
    assert supersedes(cancelled, other_history)
    assert not supersedes(other_history, cancelled)


def test_two_records_with_one_version_become_one_on_all_machines() -> None:
    record = job(1).record
    attempt = JobAttempt(number=1, nodes=(bytes(32),))
    started = changed_job(record, state="running", attempts=(attempt,))
    for other in (changed_job(record, priority=1), changed_job(record, is_paused=True)):
        assert supersedes(started, other), "an attempt may have a run"
        assert not supersedes(other, started)
    first, second = changed_job(record, priority=1), changed_job(record, priority=2)
    assert supersedes(first, second) != supersedes(second, first)
