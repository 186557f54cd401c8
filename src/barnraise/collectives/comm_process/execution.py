"""Execution of one collective: a schedule, its memory, and the progress so far. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from barnraise.collectives.algorithms.schedule import IndexedSchedule, ReceiveStep
from barnraise.collectives.comm_process.arithmetic import Combine
from barnraise.collectives.messages import OperationSpec, StartOperation
from barnraise.transport.links.frames import EAGER_BYTES

Transmit = Callable[[int, int, int, memoryview], None]  # peer, ordinal, number of the send, payload


class Execution:
    """Applies receives in the order of the schedule and releases the sends that depend on them."""

    def __init__(
        self,
        start: StartOperation,
        encoded: bytes,
        schedule: IndexedSchedule,
        memory: memoryview,
        combine: Combine | None,
        transmit: Transmit,
        early_send_gate: Callable[[int, int], bool],
    ) -> None:
        self.operation = start.operation
        self.sequence = start.sequence
        self.specification: OperationSpec = start.specification
        self.encoded = encoded
        self.steps = schedule
        self.memory = memory
        self._combine = combine
        self._transmit = transmit
        self._early_send_gate = early_send_gate
        self._receives_left = len(schedule.steps.receives)
        self._sends_left = len(schedule.steps.sends)
        self._missing = list(schedule.receive_waits)  # per receive: open dependencies
        self._blocked = list(schedule.send_waits)
        self._held: dict[int, memoryview] = {}
        self._arrived = bytearray(len(schedule.steps.receives))
        self._for_peer: dict[int, deque[int]] = {}
        self.started_peers: set[int] = set()
        self.called_by: set[int] = set()  # ranks that confirmed the call when queried
        self.deadline = 0.0
        self.progressed_at = 0.0
        self.asked_at = 0.0
        self.reported = False

    @property
    def finished(self) -> bool:
        return not self._receives_left and not self._sends_left

    @property
    def peers(self) -> frozenset[int]:
        return self.steps.peers

    def missing_ranks(self) -> list[int]:
        """Return the ranks whose bytes are missing or that have not started the operation."""
        waiting = {
            step.peer
            for step, arrived in zip(self.steps.steps.receives, self._arrived, strict=True)
            if not arrived
        }
        waiting |= {peer for peer, queue in self._for_peer.items() if queue}
        return sorted(waiting)

    def start(self) -> None:
        for number in self.steps.ready_sends:
            self._release(number)

    def peer_started(self, peer: int) -> None:
        self.started_peers.add(peer)
        for number in self._for_peer.pop(peer, ()):
            self._send(number)

    def expected(self, peer: int, ordinal: int) -> tuple[int, ReceiveStep] | None:
        """Return the receive step of a message, or None if it does not exist or has arrived."""
        indices = self.steps.receives_from.get(peer, ())
        if ordinal >= len(indices) or self._arrived[indices[ordinal]]:
            return None
        index = indices[ordinal]
        return index, self.steps.steps.receives[index]

    def place(self, index: int) -> memoryview | None:
        """Return the memory for a message, or None if its bytes must wait in a buffer."""
        step = self.steps.steps.receives[index]
        if step.reduce or self._missing[index]:
            return None
        return self.memory[step.lo : step.hi]

    def arrived(self, index: int, buffer: memoryview | None) -> list[memoryview]:
        """Apply a message and return the buffers that are free again. ``buffer`` None: it is in place."""
        self._arrived[index] = 1
        if self._missing[index]:
            assert buffer is not None
            self._held[index] = buffer
            return []
        return self._apply([(index, buffer)])

    def sent(self, number: int) -> list[memoryview]:
        """Count a send that was read from memory, and return the buffers that are free again."""
        self._sends_left -= 1
        unlocked = self.steps.read_unlocks[number]
        return self._apply(self._unblock(unlocked)) if unlocked else []

    def _unblock(self, receives: Iterable[int]) -> list[tuple[int, memoryview | None]]:
        """Count one dependency less for each receive. Return the receives that can be applied now."""
        free: list[tuple[int, memoryview | None]] = []
        for later in receives:
            self._missing[later] -= 1
            if not self._missing[later] and later in self._held:
                free.append((later, self._held.pop(later)))
        return free

    def _apply(self, ready: list[tuple[int, memoryview | None]]) -> list[memoryview]:
        freed: list[memoryview] = []
        while ready:
            current, data = ready.pop()
            step = self.steps.steps.receives[current]
            if data is not None:
                if step.reduce:
                    assert self._combine is not None
                    self._combine(self.memory[step.lo : step.hi], data, step.incoming_first)
                else:
                    self.memory[step.lo : step.hi] = data
                freed.append(data)
            self._receives_left -= 1
            ready += self._unblock(self.steps.receive_unlocks[current])
            for send in self.steps.send_unlocks[current]:
                self._blocked[send] -= 1
                if not self._blocked[send]:
                    self._release(send)
        return freed

    def _release(self, number: int) -> None:
        send = self.steps.steps.sends[number]
        nbytes = send.hi - send.lo
        if send.peer in self.started_peers or (
            nbytes <= EAGER_BYTES and self._early_send_gate(send.peer, nbytes)
        ):
            self._send(number)
        else:
            self._for_peer.setdefault(send.peer, deque()).append(number)

    def _send(self, number: int) -> None:
        send = self.steps.steps.sends[number]
        self._transmit(send.peer, self.steps.send_ordinals[number], number, self.memory[send.lo : send.hi])
