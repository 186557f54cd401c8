"""Simulation of several communication engines: small links, a random scheduler and a fake clock.

Every choice comes from one seed. The memory of an operation is poisoned when the operation is reported as
ended. So the checks detect a byte that is written or sent later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.comm_process.engine import CommEngine
from barnraise.collectives.comm_process.peers import Clocks
from barnraise.collectives.messages import (
    AbortGroup,
    CloseGroup,
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
from barnraise.testing.memory_link import MemoryLink, memory_pair
from barnraise.transport.links.link import Link
from tests.sim.operations import Collective, Message, Region

POISON = 0xDB
_MAX_PAUSE = 5  # rounds that the slowest worker waits between two commands
Command = OpenGroup | CloseGroup | AbortGroup | StartOperation | SendTo | ReceiveFrom


@dataclass(eq=False)
class Call:
    """An operation as one worker sees it."""

    group: str
    what: str
    memory: bytearray
    after: tuple[Region, ...]
    source: int = -1  # of a receive
    ended: OperationFinished | OperationFailed | None = None

    @property
    def failure(self) -> Failure | None:
        return self.ended.failure if isinstance(self.ended, OperationFailed) else None


@dataclass(eq=False)
class GroupHandle:
    """One rank's part in one group."""

    name: str
    rank: int
    tag: int | None = None
    refused: Failure | None = None
    calls: list[Call] = field(default_factory=list)
    closed: bool = False


class Machine:
    """Communication process of one worker, and the worker's part of the protocol."""

    def __init__(self, sim: Simulation, worker: bytes) -> None:
        self.sim = sim
        self.worker = worker
        self.engine = CommEngine(worker, "run", 1, Clocks(), self)
        self.links: list[MemoryLink] = []
        self.calls: dict[int, Call] = {}
        self.handles: dict[str, GroupHandle] = {}
        self.requests: dict[int, GroupHandle] = {}
        self.alive = True
        self.frozen = False

    # the engine's environment

    def now(self) -> float:
        return self.sim.now

    def now_ns(self) -> int:
        return int(self.sim.now * 1e9)

    def dial(self, member: GroupMember) -> None:
        if (self, member.worker) not in self.sim.dials:
            self.sim.dials.append((self, member.worker))

    def memory(self, segment: int, offset: int, size: int) -> memoryview:
        memory = self.calls[segment].memory
        assert offset + size <= len(memory)
        return memoryview(memory)[offset : offset + size]

    def reply(self, message: Reply) -> None:
        assert self.alive
        assert not self.frozen
        if isinstance(message, GroupOpened):
            handle = self.requests.pop(message.request)
            handle.tag = message.group
        elif isinstance(message, GroupNotOpened):
            self.requests.pop(message.request).refused = message.failure
        elif isinstance(message, OperationFinished | OperationFailed):
            self._ended(self.calls[message.operation], message)
        elif isinstance(message, WaitingFor):
            assert self.calls[message.operation].ended is None
        else:
            raise AssertionError(f"unexpected {message}")

    def _ended(self, call: Call, message: OperationFinished | OperationFailed) -> None:
        assert call.ended is None, f"{call.what} was reported twice: {call.ended}, {message}"
        call.ended = message
        if isinstance(message, OperationFinished):
            for start, data in call.after:
                actual = bytes(call.memory[start : start + len(data)])
                assert actual == data, f"{call.what}: wrong bytes from {start}"
            assert message.peer == call.source
        call.memory[:] = bytes([POISON]) * len(call.memory)

    # the worker's commands

    def open(
        self, name: str, machines: list[Machine], generation: int, table: CostTable | None
    ) -> GroupHandle:
        handle = GroupHandle(name, machines.index(self))
        request = self.sim.number()
        self.requests[request] = handle
        self.handles[name] = handle
        members = tuple(GroupMember(machine.worker, 1, ("192.0.2.1",)) for machine in machines)
        self.engine.command(OpenGroup(request, generation, name, handle.rank, members, 60.0, table))
        return handle

    def start(
        self, handle: GroupHandle, sequence: int, operation: Collective, timeout_s: float = 1000.0
    ) -> Call:
        rank = handle.rank
        what = f"{handle.name}: rank {rank}: #{sequence} {operation.specification.describe()}"
        call, number = self._call(handle, what, operation.before[rank], operation.after[rank])
        splits = operation.splits[rank] if operation.splits else None
        size = len(call.memory)
        self._command(
            handle,
            number,
            lambda tag: StartOperation(
                number, tag, sequence, operation.specification, number, 0, size, timeout_s, splits
            ),
        )
        return call

    def send(self, handle: GroupHandle, message: Message, timeout_s: float = 1000.0) -> Call:
        what = f"{handle.name}: rank {handle.rank}: send to {message.destination} tag {message.tag}"
        call, number = self._call(handle, what, message.data, ())
        size, peer = len(message.data), message.destination
        self._command(
            handle,
            number,
            lambda tag: SendTo(number, tag, peer, message.tag, message.dtype, number, 0, size, timeout_s),
        )
        return call

    def receive(self, handle: GroupHandle, message: Message, timeout_s: float = 1000.0) -> Call:
        what = f"{handle.name}: rank {handle.rank}: receive from {message.source} tag {message.tag}"
        size, peer = len(message.data), -1 if message.any_source else message.source
        call, number = self._call(handle, what, bytes(size), ((0, message.data),))
        call.source = message.source
        self._command(
            handle,
            number,
            lambda tag: ReceiveFrom(
                number, tag, peer, message.tag, message.dtype, number, 0, size, timeout_s
            ),
        )
        return call

    def close(self, handle: GroupHandle) -> None:
        assert handle.tag is not None
        handle.closed = True
        self.engine.command(CloseGroup(handle.tag))

    def abort(self, handle: GroupHandle) -> None:
        assert handle.tag is not None
        self.engine.command(AbortGroup(handle.tag, "tested"))

    def _call(
        self, handle: GroupHandle, what: str, memory: bytes, after: tuple[Region, ...]
    ) -> tuple[Call, int]:
        number = self.sim.number()
        call = Call(handle.name, what, bytearray(memory), after)
        self.calls[number] = call
        handle.calls.append(call)
        return call, number

    def _command(self, handle: GroupHandle, number: int, command: Callable[[int], Command]) -> None:
        assert handle.tag is not None
        self.engine.command(command(handle.tag))


class Simulation:
    """Machines, their links and the pending events."""

    def __init__(self, seed: int, world: int) -> None:
        self.random = Random(seed)
        self.now = 1000.0
        self.dials: list[tuple[Machine, bytes]] = []
        self._number = 0
        self.capacity = self.random.choice((200, 2_000, 20_000, 300_000))
        workers = [self.random.randbytes(16) for _ in range(world)]
        self.machines = [Machine(self, worker) for worker in workers]
        self.by_worker = {machine.worker: machine for machine in self.machines}
        self.owners: dict[Link, Machine] = {}
        self.actions: list[tuple[Machine, Callable[[], bool]]] = []
        self.events = 0

    def number(self) -> int:
        self._number += 1
        return self._number

    @property
    def live(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.alive and not machine.frozen]

    # events

    def settle(self, max_events: int = 400_000, until: Callable[[], bool] | None = None) -> None:
        """Run possible events in random order until there are none, or until ``until`` returns True."""
        idle = 0
        while idle < (_MAX_PAUSE + 2 if self.actions else 2):
            assert self.events < max_events, "the simulation does not stop"
            moved = False
            todo = self._possible()
            self.random.shuffle(todo)
            for event in todo:
                if until is not None and until():
                    return
                moved |= event()
                self.events += 1
                self.now += 2e-5
            idle = 0 if moved else idle + 1

    def advance(self, seconds: float, step: float = 0.25) -> None:
        """Turn the clock, with ticks as in the communication process, and run all events in between."""
        end = self.now + seconds
        while self.now < end:
            self.now += step
            for machine in self.live:
                machine.engine.tick()
                self._reap(machine)
            self.settle()

    def give(self, machine: Machine, handle: GroupHandle, commands: list[Callable[[], object]]) -> None:
        """Give these commands to the engine in order, once the group is open, each at a random moment."""
        pause, turn = self.random.randrange(1, _MAX_PAUSE + 1), 0
        left = list(reversed(commands))

        def action() -> bool:
            nonlocal turn
            turn += 1
            if left and handle.tag is not None and turn % pause == 0:
                left.pop()()
            return not left or handle.refused is not None or handle.closed

        self.actions.append((machine, action))

    def kill(self, machine: Machine) -> None:
        machine.alive = False
        self.dials = [dial for dial in self.dials if dial[0] is not machine]
        for link in machine.links:
            link.close("killed")
        machine.links.clear()

    def freeze(self, machine: Machine) -> None:
        machine.frozen = True

    def _possible(self) -> list[Callable[[], bool]]:
        todo: list[Callable[[], bool]] = []
        for machine in self.live:
            for link in machine.links:
                if link.is_readable:
                    todo.append(partial(self._receive, machine, link))
                if link.writer.pending:
                    todo.append(partial(self._flush, machine, link))
        todo += [partial(self._connect, *dial) for dial in self.dials]
        todo += [partial(self._act, machine, action) for machine, action in self.actions]
        return todo

    def _act(self, machine: Machine, action: Callable[[], bool]) -> bool:
        """Run an action, which returns True when it is complete."""
        if machine.alive and not machine.frozen:
            if (machine, action) not in self.actions or not action():
                return False
            self._reap(machine)
        self.actions = [item for item in self.actions if item != (machine, action)]
        return True

    def _receive(self, machine: Machine, link: MemoryLink) -> bool:
        if link not in machine.links:
            return False
        before = link.bytes_in
        link.receive()
        self._reap(machine)
        return link.bytes_in != before or link.closed is not None

    def _flush(self, machine: Machine, link: MemoryLink) -> bool:
        if link not in machine.links:
            return False
        before = link.bytes_out
        link.flush()
        self._reap(machine)
        return link.bytes_out != before

    def _reap(self, machine: Machine) -> None:
        for link in [link for link in machine.links if link.closed is not None]:
            machine.links.remove(link)
            link.close("closed")
            machine.engine.link_down(link)

    def _connect(self, dialler: Machine, worker: bytes) -> bool:
        if (dialler, worker) not in self.dials or not dialler.alive or dialler.frozen:
            return False
        other = self.by_worker.get(worker)
        if other is None or not other.alive:
            self.dials.remove((dialler, worker))
            dialler.engine.unreachable(worker, "no response")
            self._reap(dialler)
            return True
        if other.frozen:
            return False
        self.dials.remove((dialler, worker))
        capacity = max(33, int(self.capacity * self.random.uniform(0.3, 1.5)))
        own_link, peer_link = memory_pair(dialler.engine, other.engine, capacity, now=lambda: self.now)
        for machine, link, peer in ((dialler, own_link, other), (other, peer_link, dialler)):
            machine.links.append(link)
            machine.engine.link_up(peer.worker, link)
        return True

    # checks

    def check_memory(self) -> None:
        """Check that no memory was written after its operation was reported as ended."""
        for machine in self.machines:
            if not machine.alive:
                continue
            for call in machine.calls.values():
                if call.ended is not None:
                    assert call.memory.count(POISON) == len(call.memory), f"{call.what}: written later"

    def pending(self, machine: Machine, group: str | None = None) -> list[str]:
        return [
            call.what
            for call in machine.calls.values()
            if call.ended is None and (group is None or call.group == group)
        ]
