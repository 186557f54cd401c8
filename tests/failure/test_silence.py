"""A rank falls silent: the link's clock rules, and the sleeper finds out when it wakes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.failure.worker_pool import NOTICE_S, SILENCE_S, Worker, WorkerPool, answers, ask_all

_VICTIM = 1


@pytest.fixture
def four(worker_pool: WorkerPool) -> Iterator[list[Worker]]:
    """Four workers in one group whose clocks are quick."""
    workers = worker_pool.take(4, quick=True)
    worker_pool.join(workers)
    yield workers
    worker_pool.release_all()


def _pids(worker: Worker, what: str) -> list[int]:
    return {
        "trainer": [worker.pid],
        "comm_process": [worker.comm_process],
        "both": [worker.pid, worker.comm_process],
    }[what]


@pytest.mark.parametrize("what", ["trainer", "comm_process", "both"])
def test_stopped_rank_is_lost_after_silence_limit_and_can_rejoin(
    worker_pool: WorkerPool, four: list[Worker], what: str
) -> None:
    others = [worker for worker in four if worker is not four[_VICTIM]]
    worker_pool.start_all_reduces(four, 200_000)
    stopped = _pids(four[_VICTIM], what)
    since = time.monotonic_ns()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        ends = answers(others)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    for end in ends:
        assert (end["error"], end["peer"]) == ("PeerLost", _VICTIM), ends
        after = (end["at_ns"] - since) / 1e9
        assert SILENCE_S / 2 <= after <= SILENCE_S + NOTICE_S, f"after {after:.2f} s: {end}"
    # the stopped worker gets an error, too (either of two, depending on the process), and may rejoin
    awake = four[_VICTIM].answer()
    assert awake["error"] in ("PeerLost", "CommProcessLost"), awake
    ask_all(four, "leave")
    worker_pool.join(four)
    assert all(ask_all(four, "checked", seed=8))


def test_short_pause_does_not_lose_rank(worker_pool: WorkerPool, four: list[Worker]) -> None:
    """A pause far below the limit: all ranks wait, and none is lost."""
    for worker in four:
        worker.tell("checked", seed=9, count=300_000)
    for pid in _pids(four[_VICTIM], "both"):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SILENCE_S / 4)
    for pid in _pids(four[_VICTIM], "both"):
        os.kill(pid, signal.SIGCONT)
    assert all(worker.answer() for worker in four)
