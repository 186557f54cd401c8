"""Command channel of a rank that is a thread: counts its operations, and ends it where a test wants that."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.command_channel import Done
from barnraise.collectives.failures import to_error
from barnraise.collectives.messages import (
    AbortGroup,
    CancelOperation,
    CloseGroup,
    Command,
    Failure,
    GroupMember,
    GroupNotOpened,
    GroupOpened,
    OpenGroup,
    OperationFailed,
    OperationFinished,
    ReceiveFrom,
    Reply,
    SendTo,
    StartOperation,
    WaitingFor,
)
from barnraise.collectives.shm.segment import SharedSegment
from barnraise.core.config import Settings
from barnraise.testing.network import GENERATION, SimulatedNetwork, worker_id

log = logging.getLogger("barnraise.testing")

_REPLY_S = 5.0
_PORT = 1  # members of a group need one; nothing listens


class RankKilled(SystemExit):
    """End of a rank that a test kills. As after a kill, ``except Exception`` does not go on."""


class RankChannel:
    """Command channel of one rank to an engine in this process. Thread-safe.

    ``max_wait_s``: limit of every timeout. ``dies_before``: number of the operation before which the rank
    dies, or None.
    """

    generation = GENERATION
    encryption = "in memory"

    def __init__(
        self,
        network: SimulatedNetwork,
        rank: int,
        settings: Settings,
        max_wait_s: float,
        dies_before: int | None = None,
    ) -> None:
        self.settings = settings
        self.max_wait_s = max_wait_s
        self.member = GroupMember(worker_id(rank), _PORT, ())
        self.rank = rank
        self.operations = 0
        self.is_killed = False
        self.active_at = time.monotonic()
        self._dies_before = dies_before
        self._network = network
        self._host = network.add(rank, self)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Done] = {}
        self._requests: dict[int, tuple[threading.Event, list[GroupOpened | GroupNotOpened]]] = {}
        self._groups: set[int] = set()
        self._failure: Failure | None = None

    # for the groups of the rank

    def next_id(self) -> int:
        return next(self._numbers)

    def check_usable(self) -> None:
        """Count an operation, and end the rank if it dies before this one.

        Raise RankKilled in a rank that is dead, and an error after the end of the simulation.
        """
        self.active_at = time.monotonic()
        with self._lock:
            failure, was_killed = self._failure, self.is_killed
            if failure is None and not was_killed:
                self.operations += 1
                self.is_killed = self.operations == self._dies_before
        if self.is_killed:
            if not was_killed:
                self._network.call(self._die)
            raise RankKilled(f"rank {self.rank} was killed before its operation {self._dies_before}")
        if failure is not None:
            raise to_error(failure)

    def submit(self, command: Command, operation: int, done: Done) -> None:
        assert isinstance(command, StartOperation | SendTo | ReceiveFrom)
        limited = msgspec.structs.replace(command, timeout_s=min(command.timeout_s, self.max_wait_s))
        with self._lock:
            failure = self._failure
            if failure is None:
                self._pending[operation] = done
        if failure is not None:
            done(OperationFailed(operation, failure))
        else:
            self._command(limited)

    def reserve_direct(self) -> bool:
        """Return False: every reply comes from the thread of the network."""
        return False

    def release_direct(self) -> None:
        raise AssertionError("no operation is direct")

    def wait_direct(self, ended: Callable[[], bool], timeout_s: float | None) -> None:
        raise AssertionError("no operation is direct")

    def map_segment(self, segment: int, shared: SharedSegment) -> None:
        self._host.segments[segment] = shared.view
        shared.close_descriptor()

    def unmap_segment(self, segment: int) -> None:
        del self._host.segments[segment]

    def open_group(
        self,
        name: str,
        rank: int,
        members: tuple[GroupMember, ...],
        timeout_s: float,
        table: CostTable | None,
        generation: int,
    ) -> GroupOpened:
        """Open a group with the costs of a quiet network: all simulations choose the same algorithms."""
        limit_s = min(timeout_s, self.max_wait_s)
        request, event, replies = self.next_id(), threading.Event(), list[GroupOpened | GroupNotOpened]()
        with self._lock:
            if self._failure is not None:
                raise to_error(self._failure)
            self._requests[request] = (event, replies)
        costs = table or CostTable.default()
        self._command(OpenGroup(request, generation, name, rank, members, limit_s, costs))
        event.wait(limit_s + _REPLY_S)
        self.active_at = time.monotonic()
        with self._lock:
            del self._requests[request]
            failure = self._failure
        if not replies:
            late = Failure("operation-timeout", f"the group did not open within {limit_s:g} s")
            raise to_error(failure or late)
        reply = replies[0]
        if isinstance(reply, GroupNotOpened):
            raise to_error(reply.failure)
        with self._lock:
            self._groups.add(reply.group)
        return reply

    def cancel_operation(self, operation: int, group: int) -> None:
        self._command(CancelOperation(operation, group))

    def abort_group(self, group: int, reason: str) -> None:
        self._command(AbortGroup(group, reason))

    def close_group(self, group: int) -> None:
        with self._lock:
            is_open = group in self._groups
            self._groups.discard(group)
        if is_open:
            self._command(CloseGroup(group))

    def close_group_later(self, group: int) -> None:
        self._host.groups_to_close.append(group)

    # for the simulation

    def leave(self) -> None:
        """Close the groups of the rank as the end of its process would."""
        with self._lock:
            groups = sorted(self._groups)
            self._groups.clear()
        ended = Failure("operation-aborted", f"rank {self.rank} has ended")

        def end() -> None:
            self._network.end(self._host, groups)
            self.lose(ended)

        self._network.call(end)

    def abandon(self) -> None:
        """Fail what the rank waits for, because the simulation ends without it."""
        over = Failure("operation-aborted", "the simulation is over")
        self._network.call(partial(self.lose, over))

    # for the network

    def handle(self, reply: Reply) -> None:
        """Pass a reply of the engine to its caller."""
        if isinstance(reply, OperationFinished | OperationFailed):
            self.active_at = time.monotonic()
            with self._lock:
                done = self._pending.pop(reply.operation, None)
            if done is not None:
                done(reply)
        elif isinstance(reply, GroupOpened | GroupNotOpened):
            with self._lock:
                request = self._requests.get(reply.request)
            if request is not None:
                event, replies = request
                replies.append(reply)
                event.set()
        elif isinstance(reply, WaitingFor):
            log.warning("rank %d waits for %.0f s: %s", self.rank, reply.seconds, reply.message)

    def lose(self, failure: Failure) -> None:
        """Fail everything that waits, and everything that is called later."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            pending, self._pending = self._pending, {}
            requests = list(self._requests.values())
        for event, _ in requests:
            event.set()
        for operation, done in pending.items():
            done(OperationFailed(operation, failure))

    def _command(
        self,
        command: OpenGroup
        | CloseGroup
        | AbortGroup
        | CancelOperation
        | StartOperation
        | SendTo
        | ReceiveFrom,
    ) -> None:
        def run() -> None:
            if self._host.is_up:
                self._host.engine.command(command)

        self._network.call(run)

    def _die(self) -> None:
        self._network.end(self._host, ())
        self.lose(Failure("comm-process-lost", f"rank {self.rank} was killed"))
