"""Hostile input while a group is at work: no process crashes or grows, and the group keeps working."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from barnraise.identity import NodeKey
from barnraise.identity.secret import load_secret
from tests.failure.hostile_peers import ATTACKS, WAIT_S, Target
from tests.failure.worker_pool import QUICK_CLOCKS, Worker, WorkerPool, answers, ask_all, until

_GENERATION = 3
_MAX_GROWTH = 24 << 20
_SLOWEST_S = 10.0  # on a machine with much else to do; alone it is about 0.1


@dataclass
class AttackedGroup:
    """Three workers in a group, and the processes that strangers can reach."""

    workers: list[Worker]
    target: Target
    processes: dict[str, psutil.Process]

    def descriptors(self) -> dict[str, int]:
        return {name: process.num_fds() for name, process in self.processes.items()}

    def memory(self) -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in self.processes.items()}


@pytest.fixture(scope="module")
def attacked_group(worker_pool: WorkerPool) -> Iterator[AttackedGroup]:
    # Silent connections are closed after this time; an attacker's own handshake must fit in, too.
    quick = {**QUICK_CLOCKS, "BARNRAISE_NETWORK_CONNECT_TIMEOUT_S": "4"}
    settings = {"BARNRAISE_GENERATION": str(_GENERATION), **quick}
    workers = [worker_pool.fork(settings, label="attacked") for _ in range(3)]
    members = ask_all(workers, "prepare")
    for worker, member in zip(workers, members, strict=True):
        worker.comm_process = member["comm_process"]
    worker_pool.join(workers)
    assert all(ask_all(workers, "checked", count=100_000))
    standing = worker_pool.standing()
    target = Target(
        port=standing.port,
        worker=bytes.fromhex(members[1]["worker"]),
        secret=load_secret(worker_pool.state / "secret"),
        key=NodeKey.load_or_create(worker_pool.state / "node.key"),
        friend=worker_pool.friend,
        member=bytes.fromhex(members[0]["worker"]),
        run="default",
        generation=_GENERATION,
        group=workers[0].ask("group_tag"),
    )
    processes = {
        f"communication process {rank}": psutil.Process(worker.comm_process)
        for rank, worker in enumerate(workers)
    }
    processes["listener"] = psutil.Process(standing.pid)
    yield AttackedGroup(workers, target, processes)
    for worker in workers:
        worker_pool.end(worker)


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_do_not_affect_the_group(
    worker_pool: WorkerPool, attacked_group: AttackedGroup, attack: str
) -> None:
    stop = worker_pool.directory / f"stop {attack}"
    descriptors, memory = attacked_group.descriptors(), attacked_group.memory()
    for worker in attacked_group.workers:
        worker.tell("checked_loop", stop=str(stop))
    try:
        kept = ATTACKS[attack](attacked_group.target)
        grown = {name: size - memory[name] for name, size in attacked_group.memory().items()}
        if kept is not None:
            kept.close()
        settled = until(
            lambda: all(count <= descriptors[name] for name, count in attacked_group.descriptors().items()),
            WAIT_S,
        )
    finally:
        stop.touch()
        ends = answers(attacked_group.workers)
    for end in ends:
        assert end["error"] is None, end
        assert end["wrong"] == 0, end
        assert end["turns"] > 0
        assert end["slowest"] < _SLOWEST_S, end
    assert settled, f"descriptors before {descriptors}, after {attacked_group.descriptors()}"
    assert all(size < _MAX_GROWTH for size in grown.values()), grown
