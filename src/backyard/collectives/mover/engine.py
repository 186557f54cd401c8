"""The mover's decisions: groups, operations, liveness. It touches no socket and no clock.

Events come in through methods (a command, a frame, a link up or down, a tick); effects go out through the
``Environment`` and the links. The process gives it real ones, the simulation in-memory ones.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from backyard.collectives.messages import (
    AbortGroup,
    CloseGroup,
    Failed,
    Failure,
    Finished,
    Member,
    NotOpened,
    OpenGroup,
    ReceiveFrom,
    Reply,
    SendTo,
    Start,
    Waiting,
    decode_specification,
    encode_specification,
)
from backyard.collectives.mover.arithmetic import combiner
from backyard.collectives.mover.execution import Execution, Transmit
from backyard.collectives.mover.group import Group, JoinBody, group_tag
from backyard.collectives.mover.opening import Opening
from backyard.collectives.mover.parcels import Outgoing, Parcels
from backyard.collectives.mover.peers import Peer, Peers
from backyard.collectives.operations import compile_operation
from backyard.core.errors import BackyardError, ProtocolError
from backyard.transport.frames import EAGER_BYTES, MAX_PAYLOAD, Header, Kind
from backyard.transport.link import Link

_T = TypeVar("_T")

log = logging.getLogger("backyard.mover")

_STALL_ASK_S = 1.0
_STALL_REPORT_S = 10.0
_REMEMBERED = 4096
_POOLED_BUFFERS = 64
_FAILURE_CODES = frozenset({"peer-lost", "operation-timeout", "operation-mismatch", "operation-aborted"})


@dataclass(frozen=True, slots=True)
class Clocks:
    """The two link clocks: how often we speak, and after how long a silence means loss."""

    heartbeat_s: float = 1.0
    silence_s: float = 5.0


class Environment(Protocol):
    """What the engine needs of the world."""

    def now(self) -> float: ...
    def now_ns(self) -> int: ...
    def reply(self, message: Reply) -> None: ...
    def dial(self, member: Member) -> None: ...
    def memory(self, segment: int, offset: int, size: int) -> memoryview: ...


@dataclass(slots=True)
class _Sending:
    """Token of a queued collective message."""

    group: Group
    execution: Execution
    number: int


class Engine:
    """All groups of one worker."""

    def __init__(self, worker: bytes, run: str, generation: int, clocks: Clocks, world: Environment) -> None:
        self.worker = worker
        self.run = run
        self.generation = generation
        self._world = world
        self._groups: dict[int, Group] = {}
        self._early_joins: OrderedDict[tuple[bytes, int], bytes | Failure] = OrderedDict()
        self._buffers: dict[int, list[memoryview]] = {}
        self._incoming: dict[Link, tuple[Group, Execution, int, memoryview | None]] = {}
        self.peers = Peers(clocks, world.now)
        self._opening = Opening(self.peers, world, self._opened)
        self.bytes_by_group: dict[int, int] = {}
        self.operations = 0
        self.failures = 0

    # commands of the worker

    def command(self, message: OpenGroup | CloseGroup | AbortGroup | Start | SendTo | ReceiveFrom) -> None:
        if isinstance(message, OpenGroup):
            self._open(message)
            return
        group = self._groups.get(message.group)
        if isinstance(message, CloseGroup):
            if group is not None:
                self._close(group)
        elif isinstance(message, AbortGroup):
            if group is not None:
                self._abort(group, message.why)
        elif group is None:
            self._refuse(message.operation, Failure("operation-aborted", "the group is closed"))
        elif group.failure is not None:
            self._refuse(message.operation, group.failure)
        elif isinstance(message, Start):
            self._start(group, message)
        else:
            self._point_to_point(group, message)

    def _open(self, command: OpenGroup) -> None:
        now = self._world.now()
        tag = group_tag(self.run, command.generation, command.name)
        if command.generation < self.generation:
            self._world.reply(NotOpened(command.request, self._stale(command.generation)))
            return
        if command.generation > self.generation:
            self.generation = command.generation
            for group in list(self._groups.values()):
                if group.command.generation < command.generation:
                    self.fail(group, self._stale(group.command.generation))
        group = Group(tag, command, self._parcels(tag), now + command.timeout_s, table=command.table)
        self._groups[tag] = group
        for rank in group.others():
            member = command.members[rank]
            peer = self.peers.get(member.worker)
            if peer is not None:
                self._join(group, peer)
            elif self.worker > member.worker:
                self._world.dial(member)
        self._opening.advance(group)

    def _join(self, group: Group, peer: Peer) -> None:
        peer.link.send(Header(Kind.JOIN, group=group.tag), group.join_body())
        early = self._early_joins.pop((peer.worker, group.tag), None)
        if isinstance(early, Failure):
            self.fail(group, early)
        elif early is not None:
            self._joined(group, peer, early)

    def _joined(self, group: Group, peer: Peer, payload: bytes) -> None:
        rank = group.rank_of(peer.worker)
        if rank is None or group.failure is not None:
            return
        problem = group.check_join(_decode(payload, JoinBody), rank)
        if problem is not None:
            self.fail(group, Failure("operation-mismatch", f"the ranks do not agree on the group: {problem}"))
            return
        group.joined.add(rank)
        self._opening.advance(group)

    def _opened(self, group: Group) -> None:
        log.info("group %s opened: %s", group.command.name, group.table)

    def _close(self, group: Group) -> None:
        self._end_operations(group, Failure("operation-aborted", "this process closed the group"))
        self._tell(group, Header(Kind.LEAVE, group=group.tag))
        self._drop(group)

    def _abort(self, group: Group, why: str) -> None:
        self.fail(
            group,
            Failure("operation-aborted", f"this process aborted the group: {why}"),
            elsewhere=Failure("peer-lost", f"it aborted the group: {why}", peer=group.rank),
        )

    def _drop(self, group: Group) -> None:
        for rank in group.others():
            peer = self.peers.get(group.workers[rank])
            if peer is not None:
                peer.link.writer.forget(group.tag)
        self._incoming = {k: v for k, v in self._incoming.items() if v[0] is not group}
        self._groups.pop(group.tag, None)
        self.bytes_by_group.pop(group.tag, None)

    # operations

    def _start(self, group: Group, command: Start) -> None:
        now = self._world.now()
        specification = command.specification
        encoded = encode_specification(specification)
        try:
            program = compile_operation(specification, group.rank, group.world, command.splits)
            reduction = specification.reduction
            combine = combiner(specification.dtype, reduction) if reduction else None
            memory = self._world.memory(command.segment, command.offset, command.size)
        except BackyardError as error:
            self._refuse(command.operation, Failure(error.code, error.message))
            return
        execution = Execution(command, encoded, program, memory, combine)
        execution.deadline = now + command.timeout_s
        execution.progressed_at = execution.asked_at = now
        sequence = command.sequence
        group.running[sequence] = execution
        group.last_started = max(group.last_started, sequence)
        group.recent.append((sequence, encoded))
        for peer in sorted(execution.peers):
            link = self._link(group, peer)
            if link is None:
                self.fail(group, Failure("peer-lost", "its connection is gone", peer=peer))
                return
            link.send(Header(Kind.OPEN, group=group.tag, sequence=sequence), encoded)
        early = [(peer, group.take_early(peer, sequence)) for peer in sorted(execution.peers)]
        for peer, kept in early:
            if kept is not None and kept.encoded is not None and kept.encoded != encoded:
                self._mismatch(group, peer, sequence, encoded, kept.encoded)
                return
            if kept is not None and kept.encoded is not None:
                execution.started_peers.add(peer)
        transmit, may_send_early = self._transmit(group, execution), group.may_send_early(sequence)
        execution.begin(may_send_early, transmit)
        for peer, kept in early:
            for ordinal, payload in kept.messages if kept is not None else ():
                if not self._take_message(group, execution, peer, ordinal, payload):
                    return
        self._finish_if_done(group, execution)

    def _transmit(self, group: Group, execution: Execution) -> Transmit:
        tag, sequence = group.tag, execution.sequence

        def transmit(peer: int, ordinal: int, number: int, payload: memoryview) -> None:
            link = self._link(group, peer)
            if link is None:
                return  # its loss has been or is being reported
            self.bytes_by_group[tag] = self.bytes_by_group.get(tag, 0) + len(payload)
            header = Header(Kind.DATA, group=tag, sequence=sequence, first=ordinal)
            link.send_bulk(header, payload, _Sending(group, execution, number))

        return transmit

    def _take_message(
        self, group: Group, execution: Execution, peer: int, ordinal: int, payload: bytes
    ) -> bool:
        """A message that came before the operation was started here."""
        found = execution.expected(peer, ordinal)
        if found is None or found[1].hi - found[1].lo != len(payload):
            self._size_mismatch(group, execution, peer, len(payload))
            return False
        buffer = memoryview(bytearray(payload))
        self._arrived(group, execution, found[0], buffer)
        return True

    def _arrived(self, group: Group, execution: Execution, index: int, buffer: memoryview | None) -> None:
        execution.progressed_at = self._world.now()
        early, transmit = group.may_send_early(execution.sequence), self._transmit(group, execution)
        self._reuse(execution.arrived(index, buffer, early, transmit))

    def _reuse(self, freed: list[memoryview]) -> None:
        for buffer in freed:
            pool = self._buffers.setdefault(len(buffer), [])
            if len(pool) < _POOLED_BUFFERS:
                pool.append(buffer)

    def _finish_if_done(self, group: Group, execution: Execution) -> None:
        if execution.finished and group.running.get(execution.sequence) is execution:
            del group.running[execution.sequence]
            self.operations += 1
            self._world.reply(Finished(execution.operation, self._world.now_ns()))

    def _parcels(self, tag: int) -> Parcels:
        def peer_link(rank: int) -> Link | None:
            group = self._groups.get(tag)
            return self._link(group, rank) if group is not None else None

        def control(rank: int, header: Header, payload: bytes) -> None:
            link = peer_link(rank)
            if link is not None:
                link.send(header, payload)

        def bulk(rank: int, header: Header, payload: memoryview, out: Outgoing) -> None:
            link = peer_link(rank)
            if link is not None:
                self.bytes_by_group[tag] = self.bytes_by_group.get(tag, 0) + len(payload)
                link.send_bulk(header, payload, (tag, out))

        def finish(operation: int, source: int) -> None:
            self.operations += 1
            self._world.reply(Finished(operation, self._world.now_ns(), source))

        def mismatch(message: str) -> None:
            group = self._groups.get(tag)
            if group is not None:
                self.fail(group, Failure("operation-mismatch", message))

        return Parcels(tag, control, bulk, finish, mismatch)

    def _point_to_point(self, group: Group, command: SendTo | ReceiveFrom) -> None:
        if command.peer >= 0 and self._link(group, command.peer) is None:
            self.fail(group, Failure("peer-lost", "its connection is gone", peer=command.peer))
            self._refuse(command.operation, group.failure or Failure("peer-lost", "gone", peer=command.peer))
            return
        memory = self._world.memory(command.segment, command.offset, command.size)
        deadline = self._world.now() + command.timeout_s
        if isinstance(command, SendTo):
            group.parcels.send(command, memory, deadline)
        else:
            group.parcels.receive(command, memory, deadline)

    # frames

    def target(self, link: Link, header: Header) -> memoryview | None:
        """Where a bulk payload goes: tensor memory where that is safe, else a buffer."""
        peer = self.peers.of(link)
        if header.kind is Kind.PROBE:
            return self._opening.probe_space(peer, header)
        group = self._groups.get(header.group)
        rank = group.rank_of(peer.worker) if group is not None else None
        if group is None or rank is None or group.failure is not None:
            return None
        if header.kind is not Kind.DATA:
            return group.parcels.target(rank, header)
        execution = group.running.get(header.sequence)
        if execution is None:
            if header.sequence <= group.last_started or header.length > EAGER_BYTES:
                raise ProtocolError(f"data for operation {header.sequence}, which is not under way")
            return memoryview(bytearray(header.length))
        found = execution.expected(rank, header.first)
        if found is None or found[1].hi - found[1].lo != header.length:
            self._size_mismatch(group, execution, rank, header.length)
            return None
        place = execution.place(found[0])
        buffer = None if place is not None else self._buffer(header.length)
        self._incoming[link] = (group, execution, found[0], buffer)
        return place if place is not None else buffer

    def _buffer(self, size: int) -> memoryview:
        free = self._buffers.get(size)
        return free.pop() if free else memoryview(bytearray(size))

    def frame(self, link: Link, header: Header, payload: memoryview) -> None:
        peer = self.peers.of(link)
        if header.kind is Kind.DATA:
            self._data(link, peer, header, payload)
        elif header.group == 0:
            self._link_frame(peer, header, payload)
        else:
            self._group_frame(peer, header, payload)

    def _data(self, link: Link, peer: Peer, header: Header, payload: memoryview) -> None:
        under_way = self._incoming.pop(link, None)
        if under_way is not None:
            group, execution, index, buffer = under_way
            if group.failure is None:
                self._arrived(group, execution, index, buffer)
                self._finish_if_done(group, execution)
            return
        found = self._groups.get(header.group)
        rank = found.rank_of(peer.worker) if found is not None else None
        if found is None or rank is None or found.failure is not None:
            return
        running = found.running.get(header.sequence)
        if running is None:
            found.keep_data(rank, header.sequence, header.first, bytes(payload))
        elif self._take_message(found, running, rank, header.first, bytes(payload)):
            self._finish_if_done(found, running)

    def _link_frame(self, peer: Peer, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.PING:
            peer.link.send(Header(Kind.PONG, first=header.first))
        elif header.kind is Kind.PONG:
            if peer.pong(header.first, self._world.now()):
                for group in list(self._groups.values()):
                    self._opening.advance(group)
        elif header.kind is Kind.GOODBYE:
            peer.goodbye = bytes(payload[:500]).decode("utf-8", "replace") or "it left"
        elif header.kind in (Kind.PROBE, Kind.PROBED):
            self._opening.probe_frame(peer, header, payload)
            for group in list(self._groups.values()):
                self._opening.advance(group)
        else:
            raise ProtocolError(f"{header.kind.name} frame without a group")

    def _group_frame(self, peer: Peer, header: Header, payload: memoryview) -> None:
        group = self._groups.get(header.group)
        if group is None:
            self._unknown_group(peer, header, bytes(payload))
            return
        rank = group.rank_of(peer.worker)
        if rank is None:
            raise ProtocolError("a frame for a group that the sender is not in")
        if header.kind is Kind.FAIL:
            self._remote_failure(group, payload)
        elif group.failure is not None:
            return
        elif header.kind is Kind.JOIN:
            self._joined(group, peer, bytes(payload))
        elif header.kind in (Kind.MEASURE, Kind.TABLE):
            self._opening.table_frame(group, rank, header.kind, bytes(payload))
        elif header.kind is Kind.LEAVE:
            self._left(group, rank)
        elif header.kind is Kind.OPEN:
            self._peer_opened(group, rank, header.sequence, bytes(payload))
        elif header.kind is Kind.ASK:
            self._answer(group, peer, header.sequence)
        elif header.kind is Kind.TELL:
            self._told(group, rank, header.sequence, bytes(payload))
        else:
            group.parcels.frame(rank, header, payload)

    def _unknown_group(self, peer: Peer, header: Header, payload: bytes) -> None:
        """A group that is closed here, or not open yet: only its beginning is worth keeping."""
        if header.kind is Kind.JOIN:
            body = _decode(payload, JoinBody)
            if body.generation < self.generation:
                failure = msgspec.msgpack.encode(self._stale(body.generation))
                peer.link.send(Header(Kind.FAIL, group=header.group), failure)
                return
            kept: bytes | Failure = payload
        elif header.kind is Kind.FAIL and (peer.worker, header.group) in self._early_joins:
            kept = _decode(payload, Failure)
        elif header.kind is Kind.LEAVE:
            self._early_joins.pop((peer.worker, header.group), None)
            return
        else:
            return
        self._early_joins[(peer.worker, header.group)] = kept
        while len(self._early_joins) > _REMEMBERED:
            self._early_joins.popitem(last=False)

    def _peer_opened(self, group: Group, rank: int, sequence: int, encoded: bytes) -> None:
        group.peer_started[rank] = max(group.peer_started.get(rank, -1), sequence)
        execution = group.running.get(sequence)
        if execution is None:
            if sequence > group.last_started:
                group.keep_start(rank, sequence, encoded)
            return
        if execution.encoded != encoded:
            self._mismatch(group, rank, sequence, execution.encoded, encoded)
            return
        execution.peer_started(rank, self._transmit(group, execution))
        self._finish_if_done(group, execution)

    def _left(self, group: Group, rank: int) -> None:
        failure = Failure("peer-lost", "it closed the group", peer=rank)
        needed = any(rank in execution.awaited() for execution in group.running.values())
        if needed or group.parcels.pending():
            self.fail(group, failure)
        elif not group.running:
            group.failure = failure
        else:
            group.joined.discard(rank)

    def _answer(self, group: Group, peer: Peer, sequence: int) -> None:
        known = dict(group.recent)
        header = Header(Kind.TELL, group=group.tag, sequence=max(0, group.last_started + 1))
        # `first` tells whether the specification asked for is included
        payload = known.get(sequence, b"")
        peer.link.send(header, sequence.to_bytes(8, "little") + payload)

    def _told(self, group: Group, rank: int, started: int, payload: bytes) -> None:
        group.peer_started[rank] = max(group.peer_started.get(rank, -1), started - 1)
        if len(payload) <= 8:
            return
        sequence = int.from_bytes(payload[:8], "little")
        execution = group.running.get(sequence)
        if execution is not None and execution.encoded != payload[8:]:
            self._mismatch(group, rank, sequence, execution.encoded, payload[8:])

    def sent(self, link: Link, token: object) -> None:
        if isinstance(token, _Sending):
            group, execution = token.group, token.execution
            if group.running.get(execution.sequence) is not execution:
                return
            execution.progressed_at = self._world.now()
            early, transmit = group.may_send_early(execution.sequence), self._transmit(group, execution)
            self._reuse(execution.sent(token.number, early, transmit))
            self._finish_if_done(group, execution)
        elif isinstance(token, tuple):
            owner = self._groups.get(token[0])
            if owner is not None and owner.failure is None:
                owner.parcels.sent(token[1])

    # links

    def link_up(self, worker: bytes, link: Link) -> None:
        """A link has proved that the other end is this worker."""
        peer = self.peers.add(worker, link)
        peer.ping(self._world.now())
        for group in list(self._groups.values()):
            if group.failure is None and group.rank_of(worker) is not None:
                self._join(group, peer)

    def link_down(self, link: Link) -> None:
        peer = self.peers.remove(link)
        self._incoming.pop(link, None)
        if peer is None:
            return
        why = peer.goodbye or link.closed or "its connection closed"
        log.info("link to %s down: %s", peer.worker.hex()[:8], why)
        for key in [key for key in self._early_joins if key[0] == peer.worker]:
            del self._early_joins[key]
        for group in list(self._groups.values()):
            rank = group.rank_of(peer.worker)
            if rank is not None:
                self.fail(group, Failure("peer-lost", why, peer=rank))

    def unreachable(self, worker: bytes, why: str) -> None:
        """Dialling has been given up."""
        for group in list(self._groups.values()):
            rank = group.rank_of(worker)
            if rank is not None and not group.opened:
                self.fail(group, Failure("peer-lost", why, peer=rank))

    # failure

    def fail(self, group: Group, failure: Failure, *, elsewhere: Failure | None = None) -> None:
        """End the group here and tell every member why."""
        if group.failure is not None:
            return
        group.failure = failure
        self.failures += 1
        log.info("group %s failed: %s", group.command.name, failure)
        self._tell(group, Header(Kind.FAIL, group=group.tag), msgspec.msgpack.encode(elsewhere or failure))
        self._end_operations(group, failure)

    def _end_operations(self, group: Group, failure: Failure) -> None:
        for rank in group.others():
            peer = self.peers.get(group.workers[rank])
            if peer is not None:
                # before the worker hears of it: it may reuse the memory at once
                peer.link.writer.forget(group.tag)
                peer.link.reader.divert(group.tag)
        operations = [execution.operation for execution in group.running.values()]
        operations += group.parcels.pending()
        group.running.clear()
        group.early.clear()
        group.parcels = self._parcels(group.tag)
        if not group.opened:
            group.opened = True
            self._world.reply(NotOpened(group.command.request, failure))
        for operation in operations:
            self._refuse(operation, failure)

    def fail_everything(self, why: str) -> None:
        """This worker can take part in nothing more; the others must not wait for it."""
        for group in list(self._groups.values()):
            self.fail(group, Failure("peer-lost", why, peer=group.rank))

    def _remote_failure(self, group: Group, payload: memoryview) -> None:
        failure = _decode(bytes(payload), Failure)
        if failure.code not in _FAILURE_CODES or failure.peer >= group.world:
            raise ProtocolError("malformed failure report")
        if group.failure is None:
            group.failure = msgspec.structs.replace(failure, message=failure.message[:2000])
            self.failures += 1
            self._end_operations(group, group.failure)

    def _mismatch(self, group: Group, peer: int, sequence: int, ours: bytes, theirs: bytes) -> None:
        try:
            other = decode_specification(theirs).describe()
        except (msgspec.DecodeError, BackyardError) as error:
            raise ProtocolError("malformed operation") from error
        mine = decode_specification(ours).describe()
        message = (
            f"operation {sequence} of the group differs: rank {group.rank} called {mine}; "
            f"rank {peer} called {other}"
        )
        self.fail(group, Failure("operation-mismatch", message))

    def _size_mismatch(self, group: Group, execution: Execution, peer: int, size: int) -> None:
        message = (
            f"rank {peer} sent {size} bytes which rank {group.rank} does not expect in its "
            f"{execution.specification.describe()}"
        )
        self.fail(group, Failure("operation-mismatch", message))

    def _refuse(self, operation: int, failure: Failure) -> None:
        self._world.reply(Failed(operation, failure))

    def _stale(self, generation: int) -> Failure:
        return Failure(
            "operation-aborted", f"generation {generation} is over, this run is at {self.generation}"
        )

    def _tell(self, group: Group, header: Header, payload: bytes = b"") -> None:
        for rank in group.others():
            link = self._link(group, rank)
            if link is not None:
                link.send(header, payload)

    def _link(self, group: Group, rank: int) -> Link | None:
        peer = self.peers.get(group.workers[rank])
        return peer.link if peer is not None else None

    # time

    def tick(self) -> None:
        """Called several times a second: heartbeats, silence, deadlines, stalls."""
        now = self._world.now()
        for peer, why in self.peers.tick(now):
            peer.link.close(why)
        for group in list(self._groups.values()):
            if group.failure is not None:
                continue
            if not group.opened and now >= group.deadline:
                self._open_timeout(group)
                continue
            for execution in list(group.running.values()):
                self._watch(group, execution, now)
            late = group.parcels.late(now)
            if late is not None:
                other = late.command.peer
                name = f"rank {other}" if other >= 0 else "any rank"
                message = f"point-to-point with {name} (tag {late.command.tag}) found no partner in its time"
                self.fail(
                    group, Failure("operation-timeout", message, late=(other,) if other >= 0 else ())
                )

    def _open_timeout(self, group: Group) -> None:
        missing = [rank for rank in group.others() if rank not in group.joined]
        names = ", ".join(f"rank {rank}" for rank in missing) or "rank 0 (cost table)"
        self.fail(
            group,
            Failure(
                "operation-timeout",
                f"{names} did not enter the group within {group.command.timeout_s:g} s",
                late=tuple(missing),
            ),
        )

    def _watch(self, group: Group, execution: Execution, now: float) -> None:
        if now >= execution.deadline:
            message, late = self._who_is_late(group, execution)
            self.fail(group, Failure("operation-timeout", message, late=late))
            return
        stalled = now - execution.progressed_at
        if stalled >= _STALL_ASK_S and now - execution.asked_at >= _STALL_ASK_S:
            execution.asked_at = now
            self._tell(group, Header(Kind.ASK, group=group.tag, sequence=execution.sequence))
        if stalled >= _STALL_REPORT_S and not execution.reported:
            execution.reported = True
            message, _ = self._who_is_late(group, execution)
            self._world.reply(Waiting(execution.operation, stalled, message))

    def _who_is_late(self, group: Group, execution: Execution) -> tuple[str, tuple[int, ...]]:
        late = [r for r in group.others() if group.peer_started.get(r, -1) < execution.sequence]
        what = execution.specification.describe()
        if late:
            names = ", ".join(f"rank {rank}" for rank in late)
            return f"{what}: {names} alive but late, has not called it", tuple(late)
        slow = execution.awaited()
        names = ", ".join(f"rank {rank}" for rank in slow) or "the network"
        return f"{what}: every rank called it, bytes of {names} are still on the way", tuple(slow)


def _decode(payload: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed {kind.__name__}") from error


assert EAGER_BYTES <= MAX_PAYLOAD
