"""Three workers of one machine in a group at work: the port that they share is attacked."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import psutil

from barnraise.identity import NodeKey, delegate
from barnraise.identity.secret import load_secret
from barnraise.transport.links import tls
from barnraise.transport.links.frames import HEADER_BYTES, FrameHeader, FrameKind
from barnraise.transport.listener import preface
from benchmarks.attacks.registry import undisturbed
from tests.failure.worker_pool import (
    PATIENT_CLOCKS,
    QUICK_CLOCKS,
    Worker,
    WorkerPool,
    answers,
    ask_all,
    until,
)

WAIT_S = 40.0  # much longer than every deadline that a stalled stranger can have
_HELLO_BYTES = HEADER_BYTES + 16
_GENERATION = 3
_MAX_GROWTH = 24 << 20
_SLOWEST_S = 10.0  # on a machine with much else to do; alone it is about 0.1


@dataclass(frozen=True)
class Target:
    """A worker under attack, with all data that its trusted peers have."""

    port: int
    worker: bytes
    secret: bytes
    key: NodeKey
    friend: NodeKey  # of another machine, which is trusted too
    member: bytes  # another worker of the group
    run: str
    generation: int
    group: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S)

    def send_preface(self, secret: bytes | None = None) -> socket.socket:
        """Connect and send a valid preface, unless another secret is given."""
        sock = self.connect()
        sock.sendall(preface.encode(preface.Preface(self.worker, os.urandom(16)), secret or self.secret))
        return sock

    def tls_handshake(
        self, key: NodeKey, run: str, worker: bytes | None = None, stream: int = 0
    ) -> ssl.SSLSocket:
        """Perform TLS as a worker of that node and run. In TLS 1.3 the rejection arrives only afterwards."""
        sock = self.send_preface()
        assert not preface.parse_answer(take(sock, preface.ANSWER_BYTES)).refusal
        name = worker or os.urandom(16)
        context = tls.client_context(delegate(key, run=run, worker=name), [self.key.id])
        wrapped = context.wrap_socket(sock)
        try:
            wrapped.sendall(FrameHeader(FrameKind.HELLO, length=16, first=stream).encode() + name)
        except OSError:
            pass  # the refusal was faster
        return wrapped

    def open_link(self) -> ssl.SSLSocket:
        """Open a link as a trusted worker of the run that is in none of the groups."""
        sock = self.tls_handshake(self.key, self.run)
        assert take(sock, _HELLO_BYTES)[0] == FrameKind.HELLO
        return sock


def take(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "the other side hung up"
        data += piece
    return data


@dataclass
class AttackedGroup:
    """Three workers in a group, and the processes that strangers can reach."""

    pool: WorkerPool
    workers: list[Worker]
    target: Target
    processes: dict[str, psutil.Process]
    memory: dict[str, int] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Self]:
        """Start a pool of workers, and form the group."""
        # a ring for every size: then most workers are not neighbours
        pool = WorkerPool({**PATIENT_CLOCKS, "BARNRAISE_COLLECTIVES_STRATEGY": "ring"})
        try:
            yield cls.formed(pool)
        finally:
            pool.close()

    @classmethod
    def formed(cls, pool: WorkerPool) -> Self:
        """Return three workers that form the group."""
        # Silent connections are closed after this time; an attacker's own handshake must fit in, too.
        quick = {**QUICK_CLOCKS, "BARNRAISE_NETWORK_CONNECT_TIMEOUT_S": "4"}
        settings = {"BARNRAISE_GENERATION": str(_GENERATION), **quick}
        workers = [pool.fork(settings, label="attacked") for _ in range(3)]
        group_members = ask_all(workers, "prepare")
        for worker, member in zip(workers, group_members, strict=True):
            worker.comm_process = member["comm_process"]
        pool.join(workers)
        assert all(ask_all(workers, "checked", count=100_000))
        standing = pool.standing()
        target = Target(
            port=standing.port,
            worker=bytes.fromhex(group_members[1]["worker"]),
            secret=load_secret(pool.state / "secret"),
            key=NodeKey.load_or_create(pool.state / "node.key"),
            friend=pool.friend,
            member=bytes.fromhex(group_members[0]["worker"]),
            run="default",
            generation=_GENERATION,
            group=workers[0].ask("group_tag"),
        )
        processes = {
            f"communication process {rank}": psutil.Process(worker.comm_process)
            for rank, worker in enumerate(workers)
        }
        processes["listener"] = psutil.Process(standing.pid)
        return cls(pool, workers, target, processes)

    def close(self) -> None:
        """End the workers of the group; the pool stays."""
        for worker in self.workers:
            self.pool.end(worker)

    def check_growth(self) -> None:
        """Raise AssertionError if a process grew much since the attack began."""
        sizes = {name: process.memory_info().rss for name, process in self.processes.items()}
        grown = {name: size - self.memory[name] for name, size in sizes.items()}
        assert all(size < _MAX_GROWTH for size in grown.values()), f"memory grew: {grown}"

    @contextlib.contextmanager
    def honest_work(self) -> Iterator[None]:
        """Let the group sum and check without end, and judge the sums, their times and the descriptors."""
        stop = self.pool.directory / f"stop {next(self._numbers)}"
        self.memory = {name: process.memory_info().rss for name, process in self.processes.items()}
        before = self._descriptors()
        for worker in self.workers:
            worker.tell("checked_loop", stop=str(stop))
        try:
            yield
            settled = until(
                lambda: all(count <= before[name] for name, count in self._descriptors().items()), WAIT_S
            )
        finally:
            stop.touch()
            ends = answers(self.workers)
        for end in ends:
            undisturbed(end["error"] is None, f"a worker failed: {end}")
            undisturbed(end["wrong"] == 0, f"a sum was wrong: {end}")
            undisturbed(end["turns"] > 0, f"a worker stood still: {end}")
            undisturbed(end["slowest"] < _SLOWEST_S, f"a sum was slow: {end}")
        undisturbed(settled, f"descriptors before {before}, after {self._descriptors()}")

    def restore(self) -> None:
        """Raise WorkerError unless the group still sums."""
        assert all(ask_all(self.workers, "checked", count=100_000))

    def _descriptors(self) -> dict[str, int]:
        return {name: process.num_fds() for name, process in self.processes.items()}
