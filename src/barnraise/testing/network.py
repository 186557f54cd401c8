"""Engines of several ranks in one process, and the links between them. One thread runs them all.

The engines are those of the communication process. So a simulation has the same algorithms, the same order
of sums and the same errors.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from barnraise.collectives.comm_process.engine import CommEngine
from barnraise.collectives.comm_process.peers import Clocks
from barnraise.collectives.messages import CloseGroup, Failure, GroupMember, Reply
from barnraise.testing.memory_link import MemoryLink, memory_pair
from barnraise.transport.links.frames import FrameHeader, FrameKind

log = logging.getLogger("barnraise.testing")

GENERATION = 0
_RUN = "simulation"
_TICK_S = 0.05
_CAPACITY = 1 << 30  # a delay must not limit the bandwidth
_CLOSE_S = 5.0
_EXITED = "its process exited"  # what a killed worker's communication process says


class HostOwner(Protocol):
    """Rank whose engine a host runs. The thread of the network calls it."""

    def handle(self, reply: Reply) -> None: ...
    def lose(self, failure: Failure) -> None: ...


class SimulatedHost:
    """Engine of one rank, with its memory and links. Only the thread of the network uses it.

    Any thread may add to ``segments`` and ``groups_to_close``.
    """

    def __init__(self, network: SimulatedNetwork, rank: int, owner: HostOwner) -> None:
        self.rank = rank
        self.worker = worker_id(rank)
        self.is_up = True
        self.segments: dict[int, memoryview] = {}
        self.groups_to_close: deque[int] = deque()
        self.links: list[MemoryLink] = []
        self.owner = owner
        self._network = network
        self._replies: deque[Reply] = deque()
        # Links in memory never fall silent, so heartbeats would prove nothing.
        self.engine = CommEngine(self.worker, _RUN, GENERATION, Clocks(math.inf, math.inf), self)

    # environment of the engine

    def now(self) -> float:
        return time.monotonic()

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def reply(self, message: Reply) -> None:
        self._replies.append(message)

    def dial(self, member: GroupMember) -> None:
        self._network.call(partial(self._network.connect, self, member.worker))

    def memory(self, segment: int, offset: int, size: int) -> memoryview:
        return self.segments[segment][offset : offset + size]

    # the network's side

    def tick(self) -> None:
        while self.groups_to_close:
            self.engine.command(CloseGroup(self.groups_to_close.popleft()))
        self.engine.tick()

    def move(self) -> bool:
        """Send and receive what is possible now. Return True if a byte moved."""
        has_moved = False
        for link in list(self.links):
            before = link.bytes_out
            if link.writer.pending:
                link.flush()
            has_moved |= link.bytes_out != before
            while link.is_readable:
                link.receive()
                has_moved = True
            if link.closed is not None:
                self.links.remove(link)
                link.close(link.closed)  # the other end learns it, too
                self.engine.link_down(link)
                has_moved = True
        return has_moved

    def deliver_replies(self) -> None:
        while self._replies:
            self.owner.handle(self._replies.popleft())


class SimulatedNetwork:
    """Hosts and the thread that runs them. ``delay_between``: seconds from one rank to another."""

    def __init__(self, delay_between: Callable[[int, int], float]) -> None:
        self._delay_between = delay_between
        self._hosts: dict[bytes, SimulatedHost] = {}
        self._condition = threading.Condition()
        self._actions: deque[Callable[[], None]] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="simulated-network", daemon=True)

    # for any thread

    def add(self, rank: int, owner: HostOwner) -> SimulatedHost:
        """Add the host of a rank. All hosts are added before the start."""
        host = SimulatedHost(self, rank, owner)
        self._hosts[host.worker] = host
        return host

    def start(self) -> None:
        self._thread.start()

    def call(self, action: Callable[[], None]) -> None:
        """Run an action on the thread of the network, after those of earlier calls."""
        with self._condition:
            self._actions.append(action)
            self._condition.notify()

    def close(self) -> None:
        """Run the actions that were called before, and stop the thread."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join(_CLOSE_S)

    # for the thread of the network

    def connect(self, dialler: SimulatedHost, worker: bytes) -> None:
        """Connect two hosts that have no link yet."""
        if not dialler.is_up or dialler.engine.peers.get(worker) is not None:
            return
        other = self._hosts.get(worker)
        if other is None or not other.is_up:
            dialler.engine.unreachable(worker, _EXITED)
            return
        delays = (
            self._delay_between(dialler.rank, other.rank),
            self._delay_between(other.rank, dialler.rank),
        )
        ends = memory_pair(dialler.engine, other.engine, _CAPACITY, delays)
        for host, link, peer in ((dialler, ends[0], other), (other, ends[1], dialler)):
            host.links.append(link)
            host.engine.link_up(peer.worker, link)

    def end(self, host: SimulatedHost, groups: Iterable[int]) -> None:
        """End a host as the exit of its process would, after it has closed these groups.

        A killed process closes none. What it has sent arrives before the others learn of its end.
        """
        if not host.is_up:
            return
        for group in groups:
            host.engine.command(CloseGroup(group))
        for link in host.links:
            link.send(FrameHeader(FrameKind.GOODBYE), _EXITED.encode())
            link.flush()
            link.close("this process exited")
        host.links.clear()
        host.is_up = False

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            log.exception("the simulated network failed")
            failure = Failure("comm-process-lost", f"the simulated network failed: {error!r}")
            for host in self._hosts.values():
                host.owner.lose(failure)

    def _serve(self) -> None:
        next_tick = time.monotonic()
        is_closing = False
        while not is_closing:
            actions, is_closing = self._wait_until(next_tick)
            for action in actions:
                action()
            hosts = [host for host in self._hosts.values() if host.is_up]
            if time.monotonic() >= next_tick:
                for host in hosts:
                    host.tick()
                next_tick = time.monotonic() + _TICK_S
            while sum(host.move() for host in hosts):
                pass
            for host in hosts:
                host.deliver_replies()

    def _wait_until(self, next_tick: float) -> tuple[deque[Callable[[], None]], bool]:
        """Wait for an action, the next arrival or the next tick. Return the actions, and True to stop."""
        arrivals = [link.next_event_at for host in self._hosts.values() for link in host.links]
        until = min([next_tick, *(at for at in arrivals if at is not None)])
        with self._condition:
            if not self._actions and not self._is_closing:
                self._condition.wait(max(0.0, until - time.monotonic()))
            actions, self._actions = self._actions, deque()
            return actions, self._is_closing


def worker_id(rank: int) -> bytes:
    return rank.to_bytes(16, "big")
