"""Ranks that are late, call different things, or belong to the past: named, never hung, never wrong."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.failure.worker_pool import NOTICE_S, Worker, WorkerPool, answers, ask_all

_LATE_S = 4.0  # longer than a busy machine lets one of the others stand still: it would be late, too
_ODD = 2
_CALLED = {
    "kind": ("all_reduce", "broadcast"),
    "dtype": ("float32", "int32"),
    "size": ("400 bytes", "404 bytes"),
    "large size": ("2000000 bytes", "2000004 bytes"),
    "reduction": ("sum", "max"),
    "root": ("root 0", "root 2"),
    "barrier": ("all_reduce", "barrier"),
}


def _check_late(end: dict[str, object], seconds: float, limit_s: float = _LATE_S) -> None:
    assert end["error"] == "OperationTimeout", end
    assert end["late"] == [_ODD], end
    assert f"rank {_ODD}" in str(end["text"])
    assert limit_s - 0.1 <= seconds <= limit_s + NOTICE_S, end


@pytest.mark.parametrize("by", ["late_operation", "monitored", "waited", "limited_call"])
def test_late_rank_is_reported_late_not_lost(worker_pool: WorkerPool, four: list[Worker], by: str) -> None:
    since = time.monotonic_ns()
    for rank, worker in enumerate(four):
        worker.tell(by, seconds=_LATE_S, missing=rank == _ODD)
    for rank, worker in enumerate(four):
        end = worker.answer()
        if rank != _ODD:
            _check_late(end, (end["at_ns"] - since) / 1e9)
    # the late one learns from its own call that it is too late, at once
    started = time.monotonic()
    assert four[_ODD].ask("one_all_reduce")["error"] == "OperationTimeout"
    assert time.monotonic() - started < NOTICE_S


def test_receive_that_times_out_leaves_the_group_usable(four: list[Worker]) -> None:
    limit_s = 1.0
    limited, waited = four[0].ask("receive_in_vain", source=1, seconds=limit_s)
    for end in (limited, waited):
        assert end["error"] == "OperationTimeout", end
        assert end["late"] == [1], end
        assert "the group continues" in end["text"], end
    # neither of the two receives takes the message that comes now
    four[0].tell("receive_number", source=1)
    four[1].ask("send_number", number=7.0, target=0)
    assert four[0].answer() == 7.0
    assert ask_all(four, "checked") == [True] * 4


def test_group_timeout_applies_to_operations(
    worker_pool: WorkerPool, take: Callable[[int], list[Worker]]
) -> None:
    workers = take(4)
    limit_s = 1.5 * _LATE_S  # for joining as well, which is more work
    worker_pool.join(workers, timeout=limit_s)
    since = time.monotonic_ns()
    others = [worker for rank, worker in enumerate(workers) if rank != _ODD]
    for end in ask_all(others, "one_all_reduce"):
        _check_late(end, (end["at_ns"] - since) / 1e9, limit_s)


@pytest.mark.parametrize("case", _CALLED)
def test_mismatched_call_names_rank_and_operation(
    worker_pool: WorkerPool, four: list[Worker], case: str
) -> None:
    for rank, worker in enumerate(four):
        worker.tell("disagree", case=case, odd=rank == _ODD)
    for end in answers(four):
        assert end["error"] == "OperationMismatch", end
        assert f"rank {_ODD} called" in end["text"], end
        assert all(word in end["text"] for word in _CALLED[case]), end
        assert end["seconds"] < NOTICE_S, end  # half the time of its group
        assert end["right_after"], "another group of the same ranks was harmed"


def test_stale_generation_is_rejected(worker_pool: WorkerPool, take: Callable[[int], list[Worker]]) -> None:
    """Generation 5 fails the existing group. After it no group of an older generation can form."""
    workers = take(3)
    old, new = workers[:2], workers[:2]
    place = worker_pool.meeting()
    for rank, worker in enumerate(old):
        worker.tell("make_group", place=place, rank=rank, world=2, generation=4)
    assert [worker.answer()["error"] for worker in old] == [None, None]
    place = worker_pool.meeting()
    for rank, worker in enumerate(new):
        worker.tell("make_group", place=place, rank=rank, world=2, generation=5)
    assert [worker.answer()["error"] for worker in new] == [None, None]
    assert [end["value"] for end in ask_all(new, "use_group")] == [2.0, 2.0]
    for end in ask_all(old, "use_group", number=0):
        assert end["error"] == "OperationAborted", end
        assert "start 4 of the run is over" in end["text"]
    # a worker that missed the new generation, and one that took part: both are rejected with a reason
    place = worker_pool.meeting()
    pair = [workers[2], workers[0]]
    for rank, worker in enumerate(pair):
        worker.tell("make_group", place=place, rank=rank, world=2, generation=3)
    started = time.monotonic()
    for end in answers(pair):
        assert end["error"] == "OperationAborted", end
        assert "start 3 of the run is over; the run is at start 5" in end["text"], end
    assert time.monotonic() - started < NOTICE_S, "they waited for their group's time to run out"
    assert [end["value"] for end in ask_all(new, "use_group", number=1)] == [2.0, 2.0]
    for worker in workers:  # its communication process stays at generation 5, where other tests cannot use it
        worker_pool.end(worker)


@pytest.mark.slow
def test_busy_trainer_does_not_delay_its_operation(
    worker_pool: WorkerPool, take: Callable[[int], list[Worker]]
) -> None:
    """The communication process ends it while the main thread holds Python's lock."""
    workers = take(2)
    worker_pool.join(workers)
    ask_all(workers, "checked")
    for _ in range(6):  # two busy workers may leave no core for the communication processes: retry
        ends = ask_all(workers, "spin", elements=1_000_000, seconds=2.0)
        assert [end["v"] for end in ends] == [2.0, 2.0]
        if all(end["completed"] and end["issued"] < end["finished"] < end["ends"] - 0.5e9 for end in ends):
            return
    raise AssertionError(f"it is never done before they stop spinning: {ends}")
