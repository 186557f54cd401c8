"""The wire between machines that each have a key of their own: cables are cut, machines are strangers."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from barnraise.identity import NodeKey
from lab import Host, Lab
from lab.janitor import NETNS
from tests.failure.worker_pool import (
    NOTICE_S,
    QUICK_CLOCKS,
    SILENCE_S,
    Worker,
    WorkerPool,
    answers,
    ask_all,
    until,
)

_WORLD = 4


@dataclass
class Wire:
    """One worker on each host of a lab, all forked from one process outside."""

    lab: Lab
    worker_pool: WorkerPool
    workers: list[Worker]

    def group(self) -> None:
        ask_all(self.workers, "leave_all")
        self.worker_pool.join(self.workers)

    def heal(self, *cut: tuple[Host, Host]) -> None:
        """Plug all in again, once the clock of every silent link has run out at both ends."""
        are_closed = until(lambda: not any(_is_linked(*ends) for ends in cut), 60.0, every=0.2)
        self.lab.heal_all()
        assert are_closed, "a silent link is kept"

    def busy(self) -> None:
        self.worker_pool.start_all_reduces(self.workers, 200_000)

    def ends(self) -> list[dict[str, Any]]:
        return answers(self.workers)


def _is_linked(first: Host, second: Host) -> bool:
    """Tell whether either host still holds a connection to the other."""
    return any(_address(there) in _remotes(here) for here, there in ((first, second), (second, first)))


def _address(host: Host) -> str:
    return socket.inet_aton(host.address)[::-1].hex().upper()


def _remotes(host: Host) -> set[str]:
    """Return the remote addresses of established connections, as the kernel writes them."""
    lines = host.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
    return {row[2].partition(":")[0][-8:] for row in map(str.split, lines) if row[3] == "01"}


def _identity(state: Path) -> str:
    state.mkdir(mode=0o700)
    return str(NodeKey.load_or_create(state / "node.key").id)


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    worker_pool = WorkerPool({**QUICK_CLOCKS, "BARNRAISE_COLLECTIVES_STRATEGY": "ring"})
    secret = worker_pool.directory / "secret"
    secret.write_text(secrets.token_hex(32) + "\n")
    secret.chmod(0o600)
    nodes = [_identity(worker_pool.directory / f"h{number}") for number in range(_WORLD)]
    with Lab(hosts=_WORLD, rate="1gbit") as lab:
        workers = [
            worker_pool.fork(
                _settings(worker_pool, number, host.address, nodes, secret), str(NETNS / host.namespace)
            )
            for number, host in enumerate(lab.hosts)
        ]
        for worker, ready in zip(workers, ask_all(workers, "prepare"), strict=True):
            worker.comm_process = ready["comm_process"]
        yield Wire(lab, worker_pool, workers)
        for worker in workers:
            worker_pool.end(worker)
    worker_pool.close()


def _settings(
    worker_pool: WorkerPool, number: int, address: str, nodes: list[str], secret: Path
) -> dict[str, str]:
    return {
        "BARNRAISE_STATE_DIRECTORY": str(worker_pool.directory / f"h{number}"),
        "BARNRAISE_NETWORK_ADDRESSES": address,
        "BARNRAISE_NETWORK_CONNECT_TIMEOUT_S": "4",
        "BARNRAISE_NETWORK_RETRIES": "1",
        "BARNRAISE_TRUST_NODES": ",".join(nodes),
        "BARNRAISE_TRUST_SECRET_FILE": str(secret),
    }


def _check(ends: list[dict[str, Any]], guilty: set[int], since_ns: int) -> None:
    for end in ends:
        assert end["error"] == "PeerLost", ends
        assert end["peer"] in guilty, ends
        after = (end["at_ns"] - since_ns) / 1e9
        assert SILENCE_S / 2 <= after <= SILENCE_S + NOTICE_S, f"after {after:.2f} s: {ends}"


def test_four_machines_agree_over_encrypted_links(wire: Wire) -> None:
    wire.group()
    assert all(ask_all(wire.workers, "checked", count=1_000_000))
    for links in ask_all(wire.workers, "links"):
        assert len(links) == _WORLD - 1
        assert all(link.startswith("TLS_") for link in links), links


def test_cut_cable_fails_the_group_on_all_ranks(wire: Wire) -> None:
    """Ranks 1 and 2 cannot hear each other; 0 and 3 hear all ranks, and still must not wait."""
    wire.group()
    wire.busy()
    since = time.monotonic_ns()
    ends = wire.lab.hosts[1], wire.lab.hosts[2]
    wire.lab.cut(*ends)
    try:
        _check(wire.ends(), {1, 2}, since)
    finally:
        wire.heal(ends)
    wire.group()
    assert all(ask_all(wire.workers, "checked", seed=2))


def test_machine_that_receives_nothing_is_detected(wire: Wire) -> None:
    """One way only: what rank 3 says to rank 0 is lost, the rest passes."""
    wire.group()
    wire.busy()
    since = time.monotonic_ns()
    ends = wire.lab.hosts[3], wire.lab.hosts[0]
    wire.lab.cut_one_way(*ends)
    try:
        _check(wire.ends(), {0, 3}, since)
    finally:
        wire.heal(ends)
    wire.group()
    assert all(ask_all(wire.workers, "checked", seed=3))


def test_unplugged_machine_is_lost_and_others_continue(wire: Wire) -> None:
    """No reset, no goodbye. The machine itself learns it too, and comes back when it is plugged in."""
    hosts = wire.lab.hosts
    wire.group()
    wire.busy()
    since = time.monotonic_ns()
    for host in hosts[:3]:
        wire.lab.cut(hosts[3], host)
    try:
        ends = wire.ends()
        _check(ends[:3], {3}, since)
        _check(ends[3:], {0, 1, 2}, since)
        rest = wire.workers[:3]
        ask_all(rest, "leave")
        wire.worker_pool.join(rest)
        assert all(ask_all(rest, "checked", seed=4))
    finally:
        wire.heal(*((hosts[3], host) for host in hosts[:3]))
    wire.group()
    assert all(ask_all(wire.workers, "checked", seed=5))


def test_unreachable_machine_is_named(wire: Wire) -> None:
    """It is alive and in the store, but no cable leads to it: forming the group says so in words."""
    place = wire.worker_pool.meeting()
    ask_all(wire.workers, "leave_all")
    for other in wire.lab.hosts[1:]:
        wire.lab.cut(wire.lab.hosts[0], other)
    try:
        started = time.monotonic()
        for rank, worker in enumerate(wire.workers):
            worker.tell("make_group", place=place, rank=rank, world=_WORLD, generation=0, timeout=12.0)
        ends = answers(wire.workers)
    finally:
        wire.heal(*((wire.lab.hosts[0], other) for other in wire.lab.hosts[1:]))
    assert time.monotonic() - started < 12.0 + NOTICE_S
    for end in ends[1:]:
        assert end["error"] in ("PeerLost", "OperationTimeout"), ends
        assert end["peer"] == 0 or end["late"] == [0], ends
    assert ends[0]["error"] in ("PeerLost", "OperationTimeout"), ends


def test_machine_with_other_key_is_rejected_without_harm(wire: Wire) -> None:
    """It has the secret, the store and the run, but no machine here trusts its key."""
    worker_pool, host = wire.worker_pool, wire.lab.hosts[3]
    ask_all(wire.workers, "leave_all")
    loyal, contacted = wire.workers[1:], wire.workers[0]
    worker_pool.join(loyal)
    stop = worker_pool.directory / "stop-stranger"
    for worker in loyal:
        worker.tell("checked_loop", stop=str(stop))
    node = _identity(worker_pool.directory / "stranger")
    settings = _settings(worker_pool, 3, host.address, [node], worker_pool.directory / "secret")
    settings["BARNRAISE_STATE_DIRECTORY"] = str(worker_pool.directory / "stranger")
    stranger = worker_pool.fork(settings, str(NETNS / host.namespace), label="stranger")
    try:
        place = worker_pool.meeting()
        for rank, worker in enumerate((contacted, stranger)):
            worker.tell("make_group", place=place, rank=rank, world=2, generation=0, timeout=8.0)
        refused = answers((contacted, stranger))
    finally:
        stop.touch()
        ends = answers(loyal)
        worker_pool.end(stranger)
    for end in refused:
        assert end["error"] in ("PeerLost", "OperationTimeout"), refused
    assert any("trust" in end["text"] for end in refused), refused
    for end in ends:
        assert end["error"] is None, end
        assert end["wrong"] == 0
        assert end["slowest"] < 10.0, end  # on a busy machine any process may stand still for seconds
