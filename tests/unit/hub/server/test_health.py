"""A disk whose every sync takes more than a second: members train on, and the hub answers and reports it."""

from __future__ import annotations

import html
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from barnraise.hub.protocol.messages import HubProgress, RunDescription
from barnraise.hub.server.health import SLOW_S, DiskLatency, HealthMonitor, HealthStatus
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess, declared, encoded, plainly
from tests.unit.hub.training_members import COURSE, Worker, checked, stop

SYNC_S = 1.2
ANSWERED_S = 0.5


def slow_disk(calls: Path) -> list[str]:
    """Slow down the system calls from outside, like a worn memory card; renames are slow, too.

    Each such call is recorded, with the thread that made it.
    """
    return [
        *("strace", "-D", "-f", "--seccomp-bpf", "-qq", "-o", str(calls)),
        *("-e", "trace=fsync,fdatasync,?unlink,unlinkat,?rename,?renameat,renameat2"),
        *("-e", f"inject=fsync,fdatasync:delay_enter={SYNC_S * 1e6:.0f}"),
        *("-e", "inject=?unlink,unlinkat,?rename,?renameat,renameat2:delay_enter=600000"),
    ]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _commit(disk: DiskLatency, clock: Clock, seconds: float) -> None:
    disk.start_commit()
    clock.now += seconds
    disk.end_commit()


def test_disk_is_slow_after_consecutive_slow_commits(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    disk, troubles = DiskLatency(clock), HealthStatus(clock)
    lookout = HealthMonitor(troubles, disk, clock, clock)
    for seconds in (0.01, SLOW_S, SLOW_S, 0.01, SLOW_S, 2.0):
        _commit(disk, clock, seconds)
        lookout.check()
    assert not troubles.current(), "a hiccup is not a slow disk"
    for _ in range(10):
        _commit(disk, clock, 2.5)
        lookout.check()
    (trouble,) = troubles.current()
    assert "takes 2.5 s" in trouble.message
    assert [record.message.count("disk is slow") for record in caplog.records] == [1], "once"
    for _ in range(5):
        _commit(disk, clock, 0.01)
    lookout.check()
    assert not troubles.current()


def test_hanging_commit_is_reported_while_it_lasts() -> None:
    clock = Clock()
    disk = DiskLatency(clock)
    disk.start_commit()
    clock.now += 4.0
    assert disk.slow_s() is None
    clock.now += 16.0
    assert disk.slow_s() == 20.0


class Visitor(threading.Thread):
    """Client that sends requests without disk access all the time, and records the response times."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._http, self._address = httpx.Client(timeout=60.0, trust_env=False), address
        self.stopped = threading.Event()
        self.took: list[tuple[float, str]] = []

    def run(self) -> None:
        while not self.stopped.wait(0.02):
            for path in ("/v1/run", "/v1/head", "/metrics", "/"):
                begin = time.monotonic()
                self._http.get(self._address + path).raise_for_status()
                self.took.append((time.monotonic() - begin, path))
        self._http.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to slow a disk down")
def test_slow_disk_does_not_stop_training(tmp_path: Path) -> None:
    terms = msgspec.structs.replace(TERMS, round_s=0.2, base_every=4)
    calls = tmp_path / "calls"
    hub = HubProcess(tmp_path / "hub", terms, wrapper=slow_disk(calls))
    workers: list[Worker] = []
    friends: list[Friend] = []
    try:
        hub.start()
        loop, before = str(hub.pid), calls.stat().st_size
        invite = hub.invite(uses=4)
        friends += [Friend(hub.address, invite.hub_id, key) for key in (hub.owner, None, None, None)]
        owner, *members = friends
        owner.push_base(torch.zeros(LAYOUT.numel), COURSE)
        for friend in members:
            friend.join(invite)
        (folder := tmp_path / "files").mkdir()
        workers += [Worker(friend, folder, seed) for seed, friend in enumerate(members[:2])]
        visitor = Visitor(hub.address)
        for thread in (*workers, visitor):
            thread.start()
        _begin_twice(members[2])
        assert hub.invite().run == "fireside", "while the hub waits for its disk"
        _wait_for(lambda: (owner.describe().version or 0) >= 3, 240)
        _wait_for(lambda: all(len(worker.accepted) >= 2 for worker in workers), 120)
        _wait_for(lambda: "the hub's disk is slow" in html.unescape(plainly(hub.address).text), 60)
        metrics = plainly(f"{hub.address}/metrics").text
        visitor.stopped.set()
        visitor.join(60)
    finally:
        stop(workers, 120.0)
        hub.kill()
        for friend in friends:
            friend.close()
    assert checked(hub, workers, {}) >= 3
    # The thread that answers never waits for the disk. Other processes may delay a few of its answers.
    waited = [line.split()[0] for line in calls.read_text()[before:].splitlines() if "(" in line]
    assert len(waited) > 20
    assert loop not in waited
    late = [sample for sample in visitor.took if sample[0] > ANSWERED_S]
    assert len(visitor.took) > 100
    assert len(late) <= max(3, len(visitor.took) // 50), late
    print(f"longest answers of {len(visitor.took)}: {sorted(visitor.took)[-5:]}")
    assert hub.output().count("the hub's disk is slow") == 1
    assert "SSD" in hub.output()
    assert "barnraise_hub_slow_disk 1.0" in metrics
    commits = re.search(r"barnraise_hub_commit_seconds_sum ([0-9.]+)", metrics)
    assert commits is not None
    assert float(commits[1]) > SYNC_S


def _begin_twice(friend: Friend) -> None:
    """Start an upload that another one replaces; the first one's part is removed from the slow disk."""
    for _ in range(2):
        friend.version = friend.ask("POST", "/v1/leave", RunDescription).version
        lease = friend.lease()
        data = encoded(torch.randn(LAYOUT.numel) * 0.01, TERMS.codec, lease.version)
        progress = friend.ask("POST", "/v1/uploads", HubProgress, declared(lease, data))
        assert progress.offset == 0
        friend.ask("PATCH", f"/v1/uploads/{progress.id}", HubProgress, data[:1000], query="offset=0")


def _wait_for(holds: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.5)
