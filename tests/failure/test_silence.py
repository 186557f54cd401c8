"""A rank falls silent: the link's clock rules, and the sleeper finds out when it wakes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.failure.crew import NOTICE_S, SILENCE_S, Crew, Worker, answers, ask_all

_VICTIM = 1


@pytest.fixture
def four(crew: Crew) -> Iterator[list[Worker]]:
    """Four workers in one group whose clocks are quick."""
    workers = crew.take(4, quick=True)
    crew.join(workers)
    yield workers
    crew.give_back()


def _pids(worker: Worker, what: str) -> list[int]:
    return {
        "trainer": [worker.pid],
        "comm_process": [worker.comm_process],
        "both": [worker.pid, worker.comm_process],
    }[what]


@pytest.mark.parametrize("what", ["trainer", "comm_process", "both"])
def test_a_stopped_rank_is_lost_when_the_clock_has_run_and_comes_back(
    crew: Crew, four: list[Worker], what: str
) -> None:
    others = [worker for worker in four if worker is not four[_VICTIM]]
    crew.set_to_work(four, 200_000)
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
    # the sleeper hears of it too, by whatever name fits its side, and may come back
    awake = four[_VICTIM].answer()
    assert awake["error"] in ("PeerLost", "CommProcessLost"), awake
    ask_all(four, "leave")
    crew.join(four)
    assert all(ask_all(four, "checked", seed=8))


def test_a_short_pause_is_forgiven(crew: Crew, four: list[Worker]) -> None:
    """Much less than the clock, however long this sleep takes: everyone waits, nobody is lost."""
    for worker in four:
        worker.tell("checked", seed=9, count=300_000)
    for pid in _pids(four[_VICTIM], "both"):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SILENCE_S / 4)
    for pid in _pids(four[_VICTIM], "both"):
        os.kill(pid, signal.SIGCONT)
    assert all(worker.answer() for worker in four)
