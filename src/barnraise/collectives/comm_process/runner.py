"""Runs collectives: starts schedules, places received bytes, and detects mismatches. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from barnraise.collectives.algorithms.compile import compile_operation
from barnraise.collectives.comm_process.arithmetic import combiner
from barnraise.collectives.comm_process.execution import Execution, Transmit
from barnraise.collectives.comm_process.group import Group
from barnraise.collectives.messages import (
    Failure,
    OperationFailed,
    OperationFinished,
    Reply,
    StartOperation,
    WaitingFor,
    decode_specification,
    encode_specification,
)
from barnraise.core.errors import BarnraiseError, ProtocolError
from barnraise.transport.links.frames import EAGER_BYTES, FrameHeader, FrameKind
from barnraise.transport.links.link import Link

_POOLED_BUFFERS = 64
_POOLED_BYTES = 64 << 20  # of all lengths together
_POOLED_LENGTHS = 1024


_MAX_DESCRIPTION = 300
_STALL_QUERY_S = 1.0
_STALL_REPORT_S = 10.0
_ANSWER_S = 0.3  # for the answers of the other ranks, so that the error names the right ones


class RunnerHost(Protocol):
    """Environment of the runner: clock, replies and shared memory."""

    def now(self) -> float: ...
    def now_ns(self) -> int: ...
    def reply(self, message: Reply) -> None: ...
    def memory(self, segment: int, offset: int, size: int) -> memoryview: ...


class Groups(Protocol):
    """Methods of the engine that the runner calls."""

    def link_to(self, group: Group, rank: int) -> Link | None: ...
    def fail(self, group: Group, failure: Failure) -> None: ...


@dataclass(slots=True)
class SendToken:
    """Token of a queued message of a collective."""

    group: Group
    execution: Execution
    number: int


class Runner:
    """Runner for the collectives of all groups."""

    def __init__(self, world: RunnerHost, groups: Groups) -> None:
        self._environment = world
        self._groups = groups
        self._buffers: dict[int, list[memoryview]] = {}
        self._pooled_bytes = 0
        self._arriving: dict[tuple[int, int, int, int], tuple[Group, Execution, int, memoryview | None]] = {}
        self.operations = 0
        self.bytes_by_group: dict[int, int] = {}

    def start(self, group: Group, command: StartOperation) -> None:
        now = self._environment.now()
        specification = command.specification
        try:
            schedule = compile_operation(specification, group.rank, group.world, command.splits)
            reduction = specification.reduction
            combine = combiner(specification.dtype, reduction) if reduction else None
            memory = self._environment.memory(command.segment, command.offset, command.size)
        except BarnraiseError as error:
            self._environment.reply(OperationFailed(command.operation, Failure(error.code, error.message)))
            return
        sequence, encoded = command.sequence, encode_specification(specification)
        links = {peer: self._groups.link_to(group, peer) for peer in sorted(schedule.peers)}
        execution = Execution(
            command,
            encoded,
            schedule,
            memory,
            combine,
            self._transmitter(group, sequence, links),
            group.early_send_gate(sequence),
        )
        execution.deadline = now + command.timeout_s
        execution.progressed_at = execution.asked_at = now
        group.running[sequence] = execution
        group.started.add(sequence)
        group.recent.append((sequence, encoded))
        for peer, link in links.items():
            if peer in group.left:
                if group.has_announced(peer, sequence):
                    continue  # it sent its bytes before it left
                self._groups.fail(group, Failure("peer-lost", "it closed the group", peer=peer))
                return
            if link is None:
                self._groups.fail(group, Failure("peer-lost", "its connection is gone", peer=peer))
                return
            link.send(FrameHeader(FrameKind.OPEN, group=group.tag, sequence=sequence), encoded)
        self._begin(group, execution)

    def _begin(self, group: Group, execution: Execution) -> None:
        """Compare with early messages, send the ready sends, and apply the early messages."""
        sequence = execution.sequence
        # From all ranks: a rank that called another operation may send to us although we send nothing to it.
        early = [(peer, group.pop_early(peer, sequence)) for peer in group.others()]
        for peer, entry in early:
            if entry is None or entry.encoded is None:
                continue
            if entry.encoded != execution.encoded:
                self._mismatch(group, peer, sequence, execution.encoded, entry.encoded)
                return
            execution.started_peers.add(peer)
        execution.start()
        for peer, entry in early:
            for ordinal, payload in entry.messages if entry is not None else ():
                if not self._apply_early(group, execution, peer, ordinal, payload):
                    return
        self._finish_if_done(group, execution)

    def _transmitter(self, group: Group, sequence: int, links: dict[int, Link | None]) -> Transmit:
        tag, running, sent_bytes = group.tag, group.running, self.bytes_by_group

        def transmit(peer: int, ordinal: int, number: int, payload: memoryview) -> None:
            link = links[peer]
            if link is not None:
                sent_bytes[tag] = sent_bytes.get(tag, 0) + len(payload)
                header = FrameHeader(FrameKind.DATA, group=tag, sequence=sequence, first=ordinal)
                link.send_bulk(header, payload, SendToken(group, running[sequence], number))

        return transmit

    def peer_opened(self, group: Group, rank: int, sequence: int, encoded: bytes) -> None:
        """Record that a peer has started an operation."""
        group.peer_started(rank, sequence)
        execution = group.running.get(sequence)
        if execution is None:
            if sequence not in group.started:
                group.store_early_start(rank, sequence, encoded)
            elif (ours := group.find_call(sequence)) and ours != encoded:
                # It finished here (a root may wait for no rank), but the peer called another operation.
                self._mismatch(group, rank, sequence, ours, encoded)
        elif execution.encoded != encoded:
            self._mismatch(group, rank, sequence, execution.encoded, encoded)
        else:
            execution.peer_started(rank)
            self._finish_if_done(group, execution)

    def on_call_reply(self, group: Group, rank: int, header: FrameHeader, encoded: bytes) -> None:
        """Process a peer's reply to our query for an operation.

        The reply says if the peer has called the operation, and its specification if it is remembered.
        """
        execution = group.running.get(header.sequence)
        if execution is None:
            return
        if encoded and execution.encoded != encoded:
            self._mismatch(group, rank, header.sequence, execution.encoded, encoded)
        elif encoded or header.first:
            execution.called_by.add(rank)

    def place(self, group: Group, rank: int, header: FrameHeader) -> memoryview | None:
        """Return the memory for a message: tensor memory if that is safe, else a buffer. None discards it."""
        execution = group.running.get(header.sequence)
        if execution is None:
            if header.sequence in group.started:
                self._fail_finished(group, rank, header.sequence)
                return None
            if header.length > EAGER_BYTES:
                raise ProtocolError(f"data for operation {header.sequence}, which is not running")
            return memoryview(bytearray(header.length))
        match = execution.expected(rank, header.first)
        if match is None or match[1].hi - match[1].lo != header.length:
            self._size_mismatch(group, execution, rank, header.length)
            return None
        key = (group.tag, header.sequence, rank, header.first)
        if key in self._arriving:
            raise ProtocolError(f"a message of operation {header.sequence} arrives twice at once")
        place, buffer = execution.place(match[0]), None
        if place is None:
            place = buffer = self._buffer(header.length)
        self._arriving[key] = (
            group,
            execution,
            match[0],
            buffer,
        )
        return place

    def arrived(self, group: Group, rank: int, header: FrameHeader, payload: memoryview) -> None:
        """Apply a complete message, which is in the memory that ``place`` returned."""
        under_way = self._arriving.pop((group.tag, header.sequence, rank, header.first), None)
        if under_way is not None:
            _, execution, index, buffer = under_way
            execution.progressed_at = self._environment.now()
            self._recycle(execution.arrived(index, buffer))
            self._finish_if_done(group, execution)
            return
        running = group.running.get(header.sequence)
        if header.sequence in group.started and running is None:
            self._fail_finished(group, rank, header.sequence)
        elif running is None:
            group.store_early_data(rank, header.sequence, header.first, bytes(payload))
        elif self._apply_early(group, running, rank, header.first, bytes(payload)):
            self._finish_if_done(group, running)

    def _apply_early(
        self, group: Group, execution: Execution, peer: int, ordinal: int, payload: bytes
    ) -> bool:
        """Apply a message that arrived before its operation started here."""
        match = execution.expected(peer, ordinal)
        if match is None or match[1].hi - match[1].lo != len(payload):
            self._size_mismatch(group, execution, peer, len(payload))
            return False
        execution.progressed_at = self._environment.now()
        self._recycle(execution.arrived(match[0], memoryview(bytearray(payload))))
        return True

    def sent(self, token: SendToken) -> None:
        group, execution = token.group, token.execution
        if group.running.get(execution.sequence) is execution:
            execution.progressed_at = self._environment.now()
            self._recycle(execution.sent(token.number))
            self._finish_if_done(group, execution)

    def forget(self, group: Group) -> None:
        """Discard messages in progress of a group that has ended."""
        self._arriving = {key: item for key, item in self._arriving.items() if item[0] is not group}

    def expire(self, group: Group, operation: int, now: float) -> bool:
        """Time an operation out as soon as the other ranks had time to say if they have called it.

        Return False if this operation does not run.
        """
        for execution in group.running.values():
            if execution.operation == operation:
                execution.deadline = min(execution.deadline, now + _ANSWER_S)
                self._query(group, execution, now)
                return True
        return False

    def check_progress(self, group: Group, now: float) -> None:
        """Check the deadlines of all operations.

        Query other ranks about a stalled operation and report late ones.
        """
        for execution in list(group.running.values()):
            if now >= execution.deadline:
                message, late = describe_late_ranks(group, execution)
                self._groups.fail(group, Failure("operation-timeout", message, late=late))
                return
            stalled = now - execution.progressed_at
            if stalled >= _STALL_QUERY_S and now - execution.asked_at >= _STALL_QUERY_S:
                self._query(group, execution, now)
            if stalled >= _STALL_REPORT_S and not execution.reported:
                execution.reported = True
                message, _ = describe_late_ranks(group, execution)
                self._environment.reply(WaitingFor(execution.operation, stalled, message))

    def _query(self, group: Group, execution: Execution, now: float) -> None:
        """Ask the other ranks if they have called an operation."""
        execution.asked_at = now
        for rank in group.others():
            link = self._groups.link_to(group, rank)
            if link is not None:
                link.send(FrameHeader(FrameKind.ASK, group=group.tag, sequence=execution.sequence))

    def _finish_if_done(self, group: Group, execution: Execution) -> None:
        if execution.finished and group.running.get(execution.sequence) is execution:
            del group.running[execution.sequence]
            self.operations += 1
            self._environment.reply(OperationFinished(execution.operation, self._environment.now_ns()))

    def _buffer(self, length: int) -> memoryview:
        free = self._buffers.get(length)
        if not free:
            return memoryview(bytearray(length))
        self._pooled_bytes -= length
        return free.pop()

    def _recycle(self, freed: list[memoryview]) -> None:
        for buffer in freed:
            pool = self._buffers.setdefault(len(buffer), [])
            if len(pool) < _POOLED_BUFFERS:
                pool.append(buffer)
                self._pooled_bytes += len(buffer)
        if self._pooled_bytes > _POOLED_BYTES or len(self._buffers) > _POOLED_LENGTHS:
            self._buffers.clear()
            self._pooled_bytes = 0

    def _fail_finished(self, group: Group, peer: int, sequence: int) -> None:
        message = f"rank {peer} sent bytes for operation {sequence}, which is finished at rank {group.rank}"
        self._groups.fail(group, Failure("operation-mismatch", message))

    def _mismatch(self, group: Group, peer: int, sequence: int, ours: bytes, theirs: bytes) -> None:
        try:
            other = decode_specification(theirs).describe()[:_MAX_DESCRIPTION]
        except (ValueError, RecursionError, BarnraiseError):
            other = "an operation that this version cannot decode"
        message = (
            f"operation {sequence} of the group differs: rank {group.rank} called "
            f"{decode_specification(ours).describe()}; rank {peer} called {other}"
        )
        self._groups.fail(group, Failure("operation-mismatch", message))

    def _size_mismatch(self, group: Group, execution: Execution, peer: int, size: int) -> None:
        message = (
            f"rank {peer} sent {size} bytes which rank {group.rank} does not expect in its "
            f"{execution.specification.describe()}"
        )
        self._groups.fail(group, Failure("operation-mismatch", message))


def describe_late_ranks(group: Group, execution: Execution) -> tuple[str, tuple[int, ...]]:
    """Return the ranks that an operation waits for, in words and as numbers."""
    called = execution.started_peers | execution.called_by
    late = [rank for rank in group.others() if rank not in called]
    what = execution.specification.describe()
    if late:
        names = ", ".join(f"rank {rank}" for rank in late)
        return f"{what}: {names} alive but late, has not called it", tuple(late)
    slow = execution.missing_ranks()
    names = ", ".join(f"rank {rank}" for rank in slow) or "the network"
    return f"{what}: every rank called it, bytes of {names} are still on the way", tuple(slow)
