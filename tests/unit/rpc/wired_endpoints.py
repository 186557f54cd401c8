"""Endpoints in one process, connected by queues instead of links. A wire can be held, and a rank can die."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from barnraise.core.errors import PeerLost
from barnraise.rpc.endpoint import RpcEndpoint
from barnraise.rpc.messages import FRAME_BYTES, read_sizes
from barnraise.rpc.registry import FunctionRegistry


class Wire:
    """One direction of a channel, in order, delivered by a thread."""

    def __init__(self, sender: int, target: RpcEndpoint) -> None:
        self.is_full = False
        self.passes = threading.Event()
        self.passes.set()
        self._sender, self._target = sender, target
        self._packets: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def send(self, packet: bytearray, *, always: bool = False) -> bool:
        if self.is_full and not always:
            return False
        self._packets.put(packet)
        return True

    def close(self, flush_s: float) -> None:
        self.passes.set()
        self._packets.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def _deliver(self) -> None:
        while (packet := self._packets.get()) is not None:
            self.passes.wait(30.0)
            view = memoryview(packet)
            self._target.receive(self._sender, *read_sizes(view[:FRAME_BYTES]).split(view))


class Cluster:
    """Endpoints of several ranks. All have the same functions."""

    def __init__(self, world: int, threads: int = 4) -> None:
        self.registry = FunctionRegistry()
        self.ranks = [RpcEndpoint(rank, world, self.registry, threads) for rank in range(world)]
        self.wires = {
            (sender, to): Wire(sender, self.ranks[to])
            for sender in range(world)
            for to in range(world)
            if sender != to
        }
        for rank, endpoint in enumerate(self.ranks):
            endpoint.start({to: self.wires[rank, to] for to in range(world) if to != rank})

    def kill(self, rank: int) -> None:
        """Let all others lose a rank."""
        for other, endpoint in enumerate(self.ranks):
            if other != rank:
                self.wires[rank, other].close(0.0)
                endpoint.lose(rank, PeerLost(rank, "it was killed"))

    def close(self) -> None:
        for endpoint in self.ranks:
            endpoint.close(0.0)


@contextmanager
def wired(world: int, threads: int = 4) -> Iterator[Cluster]:
    cluster = Cluster(world, threads)
    try:
        yield cluster
    finally:
        cluster.close()
