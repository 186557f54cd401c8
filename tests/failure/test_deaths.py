"""A rank dies in the middle of a collective: every survivor gets its rank at once and continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.failure.worker_pool import NOTICE_S, Worker, WorkerPool, answers, ask_all, is_running, until


def check_named(ends: list[dict[str, Any]], victim: int, since_ns: int) -> None:
    """Every survivor names the right rank within the time allowed."""
    for end in ends:
        assert (end["error"], end["peer"]) == ("PeerLost", victim), ends
        assert (end["at_ns"] - since_ns) / 1e9 <= NOTICE_S, ends
        assert f"rank {victim} is lost" in end["text"]
        assert "->" in end["text"], "it does not say what to do"


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_trainer_is_named_and_survivors_rebuild(
    worker_pool: WorkerPool, four: list[Worker], victim: int
) -> None:
    survivors = [worker for rank, worker in enumerate(four) if rank != victim]
    worker_pool.start_all_reduces(four, 1_000_000)
    since = time.monotonic_ns()
    four[victim].kill()
    ends = answers(survivors)
    check_named(ends, victim, since)
    assert min(end["operations"] for end in ends) > 0
    ask_all(survivors, "leave")
    worker_pool.join(survivors)
    assert all(ask_all(survivors, "checked", seed=3))
    assert until(lambda: not is_running(four[victim].comm_process), 60.0), (
        "the dead trainer's communication process lives on"
    )


def test_killed_comm_process_is_reported_here_and_as_lost_peer_elsewhere(
    worker_pool: WorkerPool, four: list[Worker]
) -> None:
    worker_pool.start_all_reduces(four, 1_000_000)
    since = time.monotonic_ns()
    os.kill(four[1].comm_process, signal.SIGKILL)
    ends = answers(four)
    check_named([end for rank, end in enumerate(ends) if rank != 1], 1, since)
    assert ends[1]["error"] == "CommProcessLost"
    assert (ends[1]["at_ns"] - since) / 1e9 <= NOTICE_S
    ask_all(four, "leave")
    worker_pool.join(four)  # all four: the worker starts itself a new communication process
    assert all(ask_all(four, "checked", seed=4))


def test_idle_rank_sees_lost_peer_at_next_call(worker_pool: WorkerPool, four: list[Worker]) -> None:
    assert all(ask_all(four, "checked"))
    four[3].kill()
    time.sleep(0.3)
    since = time.monotonic_ns()
    check_named(ask_all(four[:3], "one_all_reduce"), 3, since)


def test_pending_operations_fail_after_rank_loss(worker_pool: WorkerPool, four: list[Worker]) -> None:
    """A receive from any rank and a queue of works fail, although the dead rank had no part in them."""
    four[0].tell("pending_receive")
    four[1].tell("pending_works", count=5)
    time.sleep(0.3)
    since = time.monotonic_ns()
    four[2].kill()
    received, works = answers(four[:2])
    check_named([received, *works], 2, since)


def test_two_ranks_lost_at_once(worker_pool: WorkerPool, four: list[Worker]) -> None:
    worker_pool.start_all_reduces(four, 1_000_000)
    since = time.monotonic_ns()
    four[1].kill()
    four[2].kill()
    survivors = [four[0], four[3]]
    for end in answers(survivors, 10.0):
        assert end["error"] == "PeerLost", end
        assert end["peer"] in (1, 2), end
        assert (end["at_ns"] - since) / 1e9 <= NOTICE_S
    ask_all(survivors, "leave")
    worker_pool.join(survivors)
    assert all(ask_all(survivors, "checked", seed=5))


def test_training_continues_after_rank_loss(
    worker_pool: WorkerPool, take: Callable[[int], list[Worker]]
) -> None:
    """DDP's C++ sees the failure, the process survives, and the model is wrapped again."""
    workers = take(3)
    worker_pool.join(workers)
    for rank, worker in enumerate(workers):
        worker.tell("train", steps=1000, kill_at=5 if rank == 1 else -1)
    ends = [workers[rank].answer() for rank in (0, 2)]
    workers[1].kill()
    for end in ends:
        assert end["error"] in ("PeerLost", "RuntimeError"), end
        assert "[peer-lost] rank 1 is lost" in end["text"], end
        assert end["steps"] == 5
    survivors = [workers[0], workers[2]]
    ask_all(survivors, "leave")
    worker_pool.join(survivors)
    again = ask_all(survivors, "train", steps=5, seed=1)
    assert [end["error"] for end in again] == [None, None]
    assert again[0]["sum"] == again[1]["sum"], "the replicas differ"
    assert again[0]["sum"] != ends[0]["sum"], "nothing was learnt"


def test_abort_from_other_thread_fails_operations_on_all_ranks(
    worker_pool: WorkerPool, four: list[Worker]
) -> None:
    """Rank 3 never calls, so nothing but the abort can end what the others wait for."""
    four[0].tell("abort_after", seconds=0.5, elements=1000)
    for worker in four[1:3]:
        worker.tell("one_all_reduce")
    ends = answers(four[:3])
    called = ends[0]["called_ns"]
    assert ends[0]["error"] == "OperationAborted", ends[0]
    assert (ends[0]["at_ns"] - called) / 1e9 <= NOTICE_S
    check_named(ends[1:], 0, called)
    since = time.monotonic_ns()
    check_named([four[3].ask("one_all_reduce")], 0, since)
    ask_all(four, "leave")
    worker_pool.join(four)
    assert all(ask_all(four, "checked", seed=6))
