"""Ranks that leave, politely or not, and what they leave behind: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from barnraise.agent_client.client import ListenerClient
from tests.failure.crew import NOTICE_S, REPOSITORY, Crew, Worker, answers, ask_all, is_running, living, until
from tests.failure.test_deaths import check_named

_LASTING = {"node.key", "secret", "openssl.cnf", "listener.lock", "listener.log", "listener.start"}
_SCRIPT = """
import sys
import torch, torch.distributed as dist
from barnraise.collectives.torch_patch.autoload import register
register()
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("barnraise", store=store, rank=int(sys.argv[2]), world_size=2)
tensor = torch.ones(1000)
for _ in range(3):
    dist.all_reduce(tensor)
assert tensor[0] == 8
"""


def test_who_destroys_its_group_is_named_to_those_who_still_call(crew: Crew, four: list[Worker]) -> None:
    assert all(ask_all(four, "checked"))
    four[2].ask("leave")
    since = time.monotonic_ns()
    others = [four[0], four[1], four[3]]
    ends = ask_all(others, "one_all_reduce")
    check_named(ends, 2, since)
    assert "closed the group" in ends[0]["text"]


def test_a_destroyed_group_ends_what_others_wait_for(crew: Crew, four: list[Worker]) -> None:
    assert all(ask_all(four, "checked"))
    others = four[:3]
    for worker in others:
        worker.tell("one_all_reduce")
    time.sleep(0.3)
    since = time.monotonic_ns()
    four[3].tell("leave")
    check_named(answers(others), 3, since)
    four[3].answer()


def test_who_has_done_its_part_may_leave_at_once(crew: Crew, four: list[Worker]) -> None:
    """The last operation of a program: nobody waits for the slowest rank before it destroys the group."""
    for turn in range(5):
        assert all(ask_all(four, "checked_and_leave", seed=turn))
        crew.join(four)


def test_an_ordinary_exit_tells_the_others(crew: Crew, four: list[Worker]) -> None:
    assert all(ask_all(four, "checked"))
    for worker in four[1:]:
        worker.tell("one_all_reduce")
    time.sleep(0.3)
    since = time.monotonic_ns()
    four[0].ask("exit")
    ends = answers(four[1:])
    assert max(end["at_ns"] - since for end in ends) / 1e9 <= 2 * NOTICE_S  # the interpreter has to end first
    assert {(end["error"], end["peer"]) for end in ends} == {("PeerLost", 0)}
    assert until(lambda: not is_running(four[0].pid) and not is_running(four[0].comm_process), 60.0)
    four[0].kill()
    assert four[0].words() == "", "it did not leave quietly"


@pytest.fixture
def house(crew: Crew) -> Path:
    """A state directory of its own, and a directory for temporary files."""
    directory = crew.directory / f"house-{time.monotonic_ns()}"
    (directory / "tmp").mkdir(parents=True)
    return directory


def _settings(house: Path) -> dict[str, str]:
    return {"BARNRAISE_STATE_DIRECTORY": str(house / "state"), "TMPDIR": str(house / "tmp")}


def _check_nothing_is_left(house: Path, pids: list[int]) -> None:
    # to ask the listener whether it is there would keep it there
    # The listener waits 2 s for another worker; the rest is room for a machine that is short of memory.
    assert until(lambda: not any(is_running(pid) for pid in pids), 60.0), (
        f"left: {[psutil.Process(pid) for pid in pids if is_running(pid)]}"
    )
    assert until(lambda: not living(house / "state"), 60.0, every=0.3), "the listener does not end"
    files = {path.name for path in (house / "state").rglob("*")}
    assert files <= _LASTING, files - _LASTING
    assert list((house / "tmp").iterdir()) == []
    assert not [name for name in os.listdir("/dev/shm") if "barnraise" in name]


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_nothing_is_left_behind(crew: Crew, house: Path, how: str) -> None:
    workers = [crew.fork(_settings(house)) for _ in range(2)]
    crew.join(workers)
    assert all(ask_all(workers, "checked"))
    comm_processes = [worker.ask("prepare")["comm_process"] for worker in workers]
    with ListenerClient.connect(house / "state", timeout=60.0) as client:
        listener = client.standing().pid
    for worker in workers:
        if how == "exit":
            worker.ask("exit")
        worker.kill()
    _check_nothing_is_left(house, [*comm_processes, listener, *(worker.pid for worker in workers)])


@pytest.mark.slow
def test_a_script_that_just_ends_ends_well(crew: Crew, house: Path) -> None:
    """No destroy_process_group: exit code 0, no word on standard error, nothing left."""
    environment = {**os.environ, **_settings(house), "PYTHONPATH": str(REPOSITORY / "src")}
    place = crew.meeting()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, place, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said
    assert said == ["", ""]
    _check_nothing_is_left(house, [process.pid for process in ranks])


def _check_growth(held: list[dict[str, list[dict[str, list[int]]]]], times: int) -> None:
    """The first third warms up caches and allocators; a leak goes on after it."""
    for answer in held:
        assert answer["wrong"] == 0
        for who in ("worker", "comm_process"):
            rows = [sample[who] for sample in answer["samples"]]
            settled = rows[len(rows) // 3 :]
            descriptors, threads, memory = zip(*settled, strict=True)
            assert max(descriptors) - min(descriptors) <= 1, f"{who}: descriptors {descriptors}"
            assert max(threads) - min(threads) <= 1, f"{who}: threads {threads}"
            per_rebuild = (memory[-1] - memory[0]) / (times * 2 / 3)
            assert per_rebuild < 8.0, f"{who}: {per_rebuild:.1f} KiB each time: {memory}"


def _rebuild(crew: Crew, workers: list[Worker], times: int) -> None:
    place = crew.meeting()
    for rank, worker in enumerate(workers):
        worker.tell("rebuild", place=place, rank=rank, world=len(workers), times=times, every=times // 30)
    _check_growth(answers(workers, 120.0 + times / 5), times)


def test_rebuilding_leaks_nothing(crew: Crew, take: Callable[[int], list[Worker]]) -> None:
    _rebuild(crew, take(2), 200)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_thousand_rebuilds_leak_nothing(crew: Crew, take: Callable[[int], list[Worker]]) -> None:
    _rebuild(crew, take(3), 1000)
