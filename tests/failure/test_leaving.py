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
from tests.failure.test_deaths import check_named
from tests.failure.worker_pool import (
    NOTICE_S,
    REPOSITORY,
    Worker,
    WorkerPool,
    answers,
    ask_all,
    is_running,
    running_processes,
    until,
)

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


def test_rank_that_destroyed_group_is_named_in_later_calls(
    worker_pool: WorkerPool, four: list[Worker]
) -> None:
    assert all(ask_all(four, "checked"))
    four[2].ask("leave")
    since = time.monotonic_ns()
    others = [four[0], four[1], four[3]]
    ends = ask_all(others, "one_all_reduce")
    check_named(ends, 2, since)
    assert "closed the group" in ends[0]["text"]


def test_destroyed_group_fails_pending_operations_of_others(
    worker_pool: WorkerPool, four: list[Worker]
) -> None:
    assert all(ask_all(four, "checked"))
    others = four[:3]
    for worker in others:
        worker.tell("one_all_reduce")
    time.sleep(0.3)
    since = time.monotonic_ns()
    four[3].tell("leave")
    check_named(answers(others), 3, since)
    four[3].answer()


def test_rank_may_leave_after_its_part_of_last_operation(worker_pool: WorkerPool, four: list[Worker]) -> None:
    """In the last operation no rank waits for the slowest one before it destroys the group."""
    for turn in range(5):
        assert all(ask_all(four, "checked_and_leave", seed=turn))
        worker_pool.join(four)


def test_ordinary_exit_is_reported_to_others(worker_pool: WorkerPool, four: list[Worker]) -> None:
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
    assert four[0].log_tail() == "", "it did not leave quietly"


@pytest.fixture
def directory(worker_pool: WorkerPool) -> Path:
    """A state directory of its own, and a directory for temporary files."""
    directory = worker_pool.directory / f"directory-{time.monotonic_ns()}"
    (directory / "tmp").mkdir(parents=True)
    return directory


def _settings(directory: Path) -> dict[str, str]:
    return {"BARNRAISE_STATE_DIRECTORY": str(directory / "state"), "TMPDIR": str(directory / "tmp")}


def _check_nothing_is_left(directory: Path, pids: list[int]) -> None:
    # to ask the listener whether it is there would keep it there
    # The listener waits 2 s for another worker; the rest is room for a machine that is short of memory.
    assert until(lambda: not any(is_running(pid) for pid in pids), 60.0), (
        f"left: {[psutil.Process(pid) for pid in pids if is_running(pid)]}"
    )
    assert until(lambda: not running_processes(directory / "state"), 60.0, every=0.3), (
        "the listener does not end"
    )
    files = {path.name for path in (directory / "state").rglob("*")}
    assert files <= _LASTING, files - _LASTING
    assert list((directory / "tmp").iterdir()) == []
    assert not [name for name in os.listdir("/dev/shm") if "barnraise" in name]


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_exit_leaves_no_processes_or_files(worker_pool: WorkerPool, directory: Path, how: str) -> None:
    workers = [worker_pool.fork(_settings(directory)) for _ in range(2)]
    worker_pool.join(workers)
    assert all(ask_all(workers, "checked"))
    comm_processes = [worker.ask("prepare")["comm_process"] for worker in workers]
    with ListenerClient.connect(directory / "state", timeout=60.0) as client:
        listener = client.standing().pid
    for worker in workers:
        if how == "exit":
            worker.ask("exit")
        worker.kill()
    _check_nothing_is_left(directory, [*comm_processes, listener, *(worker.pid for worker in workers)])


@pytest.mark.slow
def test_script_without_destroy_exits_with_zero(worker_pool: WorkerPool, directory: Path) -> None:
    """No destroy_process_group: exit code 0, no word on standard error, nothing left."""
    environment = {**os.environ, **_settings(directory), "PYTHONPATH": str(REPOSITORY / "src")}
    place = worker_pool.meeting()
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
        outputs = [process.communicate(timeout=150)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert outputs == ["", ""]
    _check_nothing_is_left(directory, [process.pid for process in ranks])


def _check_growth(held: list[dict[str, list[dict[str, list[int]]]]], times: int) -> None:
    """The first third warms up caches and allocators; a leak goes on after it."""
    for answer in held:
        assert answer["wrong"] == 0
        for process_name in ("worker", "comm_process"):
            rows = [sample[process_name] for sample in answer["samples"]]
            settled = rows[len(rows) // 3 :]
            descriptors, threads, memory = zip(*settled, strict=True)
            assert max(descriptors) - min(descriptors) <= 1, f"{process_name}: descriptors {descriptors}"
            assert max(threads) - min(threads) <= 1, f"{process_name}: threads {threads}"
            per_rebuild = (memory[-1] - memory[0]) / (times * 2 / 3)
            assert per_rebuild < 8.0, f"{process_name}: {per_rebuild:.1f} KiB each time: {memory}"


def _rebuild(worker_pool: WorkerPool, workers: list[Worker], times: int) -> None:
    place = worker_pool.meeting()
    for rank, worker in enumerate(workers):
        worker.tell("rebuild", place=place, rank=rank, world=len(workers), times=times, every=times // 30)
    _check_growth(answers(workers, 120.0 + times / 5), times)


def test_group_rebuild_leaks_no_resources(
    worker_pool: WorkerPool, take: Callable[[int], list[Worker]]
) -> None:
    _rebuild(worker_pool, take(2), 200)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_thousand_group_rebuilds_leak_no_resources(
    worker_pool: WorkerPool, take: Callable[[int], list[Worker]]
) -> None:
    _rebuild(worker_pool, take(3), 1000)
