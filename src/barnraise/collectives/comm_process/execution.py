"""One collective under way: a program, the memory it works on, and what has happened so far. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from barnraise.collectives.algorithms.schedule import IndexedSchedule, ReceiveStep
from barnraise.collectives.comm_process.arithmetic import Combine
from barnraise.collectives.messages import OperationSpec, StartOperation
from barnraise.transport.links.frames import EAGER_BYTES

Transmit = Callable[[int, int, int, memoryview], None]  # peer, ordinal, number of the send, payload


class Execution:
    """Applies receives in the program's order and releases the sends that they unlock."""

    def __init__(
        self,
        start: StartOperation,
        encoded: bytes,
        program: IndexedSchedule,
        memory: memoryview,
        combine: Combine | None,
        transmit: Transmit,
        may_send_early: Callable[[int, int], bool],
    ) -> None:
        self.operation = start.operation
        self.sequence = start.sequence
        self.specification: OperationSpec = start.specification
        self.encoded = encoded
        self.program = program
        self.memory = memory
        self._combine = combine
        self._transmit = transmit
        self._may_send_early = may_send_early
        self._receives_left = len(program.program.receives)
        self._sends_left = len(program.program.sends)
        self._missing = list(program.receive_waits)  # receives: how many before it are still open
        self._blocked = list(program.send_waits)
        self._held: dict[int, memoryview] = {}
        self._arrived = bytearray(len(program.program.receives))
        self._for_peer: dict[int, deque[int]] = {}
        self.started_peers: set[int] = set()
        self.called_by: set[int] = set()  # others that said so when asked
        self.deadline = 0.0
        self.progressed_at = 0.0
        self.asked_at = 0.0
        self.reported = False

    @property
    def finished(self) -> bool:
        return not self._receives_left and not self._sends_left

    @property
    def peers(self) -> frozenset[int]:
        return self.program.peers

    def awaited(self) -> list[int]:
        """Ranks from which bytes are still to come, or which have not started it."""
        waiting = {
            action.peer
            for action, arrived in zip(self.program.program.receives, self._arrived, strict=True)
            if not arrived
        }
        waiting |= {peer for peer, queue in self._for_peer.items() if queue}
        return sorted(waiting)

    def begin(self) -> None:
        for number in self.program.ready_sends:
            self._release(number)

    def peer_started(self, peer: int) -> None:
        self.started_peers.add(peer)
        for number in self._for_peer.pop(peer, ()):
            self._hand_over(number)

    def expected(self, peer: int, ordinal: int) -> tuple[int, ReceiveStep] | None:
        """The receive that this message is for; None if there is none or it has arrived already."""
        indices = self.program.receives_from.get(peer, ())
        if ordinal >= len(indices) or self._arrived[indices[ordinal]]:
            return None
        index = indices[ordinal]
        return index, self.program.program.receives[index]

    def place(self, index: int) -> memoryview | None:
        """Memory that may be written at once; None: the bytes must wait in a buffer for their turn."""
        action = self.program.program.receives[index]
        if action.reduce or self._missing[index]:
            return None
        return self.memory[action.lo : action.hi]

    def arrived(self, index: int, buffer: memoryview | None) -> list[memoryview]:
        """Take in a message (``buffer`` None: already in place); returns buffers that are free again."""
        self._arrived[index] = 1
        if self._missing[index]:
            assert buffer is not None
            self._held[index] = buffer
            return []
        return self._apply([(index, buffer)])

    def sent(self, number: int) -> list[memoryview]:
        """A send was read from memory; returns buffers that are free again."""
        self._sends_left -= 1
        unlocked = self.program.read_unlocks[number]
        return self._apply(self._now_free(unlocked)) if unlocked else []

    def _now_free(self, receives: Iterable[int]) -> list[tuple[int, memoryview | None]]:
        """Count one reason to wait less for each; those without any left whose bytes are here."""
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
            action = self.program.program.receives[current]
            if data is not None:
                if action.reduce:
                    assert self._combine is not None
                    self._combine(self.memory[action.lo : action.hi], data, action.incoming_first)
                else:
                    self.memory[action.lo : action.hi] = data
                freed.append(data)
            self._receives_left -= 1
            ready += self._now_free(self.program.receive_unlocks[current])
            for send in self.program.send_unlocks[current]:
                self._blocked[send] -= 1
                if not self._blocked[send]:
                    self._release(send)
        return freed

    def _release(self, number: int) -> None:
        send = self.program.program.sends[number]
        nbytes = send.hi - send.lo
        if send.peer in self.started_peers or (
            nbytes <= EAGER_BYTES and self._may_send_early(send.peer, nbytes)
        ):
            self._hand_over(number)
        else:
            self._for_peer.setdefault(send.peer, deque()).append(number)

    def _hand_over(self, number: int) -> None:
        send = self.program.program.sends[number]
        self._transmit(send.peer, self.program.send_ordinals[number], number, self.memory[send.lo : send.hi])
