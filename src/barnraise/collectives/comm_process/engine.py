"""Decisions of the communication process: groups, operations, liveness. It uses no socket and no clock.

Events are method calls: a command, a frame, a link up or down, a tick. Effects are calls on the
``EngineEnvironment`` and the links. The process provides real ones, the simulation in-memory ones.
"""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

import msgspec

from barnraise.collectives.comm_process.decode import decode_peer, is_plausible, truncate_failure
from barnraise.collectives.comm_process.group import Group, JoinBody, group_tag
from barnraise.collectives.comm_process.group_setup import GroupSetup
from barnraise.collectives.comm_process.links.early_joins import EarlyJoins
from barnraise.collectives.comm_process.peers import Clocks, PeerLink, Peers
from barnraise.collectives.comm_process.point_to_point import OutgoingMessage, PointToPoint
from barnraise.collectives.comm_process.runner import Runner, SendToken
from barnraise.collectives.messages import (
    AbortGroup,
    CancelOperation,
    CloseGroup,
    Failure,
    GroupMember,
    GroupNotOpened,
    OpenGroup,
    OperationFailed,
    OperationFinished,
    ReceiveFrom,
    Reply,
    SendTo,
    StartOperation,
)
from barnraise.core.errors import ProtocolError
from barnraise.transport.links.frames import BULK, FrameHeader, FrameKind
from barnraise.transport.links.link import Link

_T = TypeVar("_T")

log = logging.getLogger("barnraise.comm_process")

_MAX_REPLY_BYTES = 1 << 20  # queued control bytes per peer; beyond this its requests are dropped


class EngineEnvironment(Protocol):
    """Environment of the engine: clock, replies, dialling and shared memory."""

    def now(self) -> float: ...
    def now_ns(self) -> int: ...
    def reply(self, message: Reply) -> None: ...
    def dial(self, member: GroupMember) -> None: ...
    def memory(self, segment: int, offset: int, size: int) -> memoryview: ...


class CommEngine:
    """Engine for all groups of one worker."""

    def __init__(
        self, worker: bytes, run: str, generation: int, clocks: Clocks, world: EngineEnvironment
    ) -> None:
        self.worker = worker
        self.run = run
        self.generation = generation
        self._environment = world
        self._groups: dict[int, Group] = {}
        self._early_joins = EarlyJoins()
        self._runner = Runner(world, self)
        self.peers = Peers(clocks, world.now)
        self._setup = GroupSetup(self.peers, world, self._on_opened)
        self.failures = 0
        self._point_to_points = 0

    # commands of the worker

    def command(
        self,
        message: OpenGroup
        | CloseGroup
        | AbortGroup
        | CancelOperation
        | StartOperation
        | SendTo
        | ReceiveFrom,
    ) -> None:
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
        elif isinstance(message, CancelOperation):
            if group is not None and group.failure is None:
                self._cancel(group, message.operation)
        elif group is None:
            self._reply_failed(message.operation, Failure("operation-aborted", "the group is closed"))
        elif group.failure is not None:
            self._reply_failed(message.operation, group.failure)
        elif isinstance(message, StartOperation):
            self._runner.start(group, message)
        else:
            self._start_point_to_point(group, message)

    def _open(self, command: OpenGroup) -> None:
        now = self._environment.now()
        tag = group_tag(self.run, command.generation, command.name)
        if command.generation < self.generation:
            self._environment.reply(GroupNotOpened(command.request, self._stale_failure(command.generation)))
            return
        if command.generation > self.generation:
            self.generation = command.generation
            for group in list(self._groups.values()):
                if group.command.generation < command.generation:
                    self.fail(group, self._stale_failure(group.command.generation))
        group = Group(
            tag, command, self._make_point_to_point(tag), now + command.timeout_s, table=command.table
        )
        self._groups[tag] = group
        for rank in group.others():
            member = command.members[rank]
            peer = self.peers.get(member.worker)
            if group.failure is not None:
                return  # a failure arrived before this rank opened the group
            if peer is not None:
                self._join(group, peer)
            elif self.worker > member.worker:
                self._environment.dial(member)
        self._setup.advance(group)

    def _join(self, group: Group, peer: PeerLink) -> None:
        peer.link.send(FrameHeader(FrameKind.JOIN, group=group.tag), group.join_body())
        early = self._early_joins.pop(peer.worker, group.tag)
        if isinstance(early, Failure):
            lost = Failure("peer-lost", "it gave the group up", peer=group.workers.index(peer.worker))
            self.fail(group, early if is_plausible(early, group.world) else lost)
        elif early is not None:
            self._on_join(group, peer, early)

    def _on_join(self, group: Group, peer: PeerLink, payload: bytes) -> None:
        rank = group.rank_of(peer.worker)
        if rank is None or group.failure is not None:
            return
        problem = group.check_join(decode_peer(payload, JoinBody), rank)
        if problem is not None:
            self.fail(group, Failure("operation-mismatch", f"the ranks do not agree on the group: {problem}"))
            return
        group.joined.add(rank)
        self._setup.advance(group)

    def _on_opened(self, group: Group) -> None:
        log.info("group %s opened: %s", group.command.name, group.table)

    def _close(self, group: Group) -> None:
        """Close a group on this rank.

        The other ranks can finish operations for which this rank has done its part. All other operations
        fail.
        """
        if group.failure is None and (group.running or group.point_to_point.pending()):
            lost = Failure("peer-lost", "it closed the group", peer=group.rank)
            self._send_to_all(
                group, FrameHeader(FrameKind.FAIL, group=group.tag), msgspec.msgpack.encode(lost)
            )
        self._fail_operations(group, Failure("operation-aborted", "this process closed the group"))
        self._send_to_all(group, FrameHeader(FrameKind.LEAVE, group=group.tag))
        self._remove_group(group)

    def _abort(self, group: Group, reason: str) -> None:
        self.fail(
            group,
            Failure("operation-aborted", f"this process aborted the group: {reason}"),
            elsewhere=Failure("peer-lost", f"it aborted the group: {reason}", peer=group.rank),
        )

    def _cancel(self, group: Group, operation: int) -> None:
        """Time an operation out now, unless it is complete."""
        now = self._environment.now()
        if not self._runner.expire(group, operation, now):
            group.point_to_point.expire(operation, now)
            self._check_messages(group, now)

    def _remove_group(self, group: Group) -> None:
        for rank in group.others():
            peer = self.peers.get(group.workers[rank])
            if peer is not None:
                peer.link.forget(group.tag)
        self._groups.pop(group.tag, None)
        self._runner.bytes_by_group.pop(group.tag, None)

    # operations

    def _make_point_to_point(self, tag: int) -> PointToPoint:
        sent_bytes = self._runner.bytes_by_group

        def peer_link(rank: int) -> Link | None:
            group = self._groups.get(tag)
            return self.link_to(group, rank) if group is not None else None

        def control(rank: int, header: FrameHeader, payload: bytes) -> None:
            link = peer_link(rank)
            if link is not None and header.kind in BULK:
                link.send_bulk(header, memoryview(payload), None)
            elif link is not None:
                link.send(header, payload)

        def bulk(rank: int, header: FrameHeader, payload: memoryview, out: OutgoingMessage) -> None:
            link = peer_link(rank)
            if link is not None:
                sent_bytes[tag] = sent_bytes.get(tag, 0) + len(payload)
                link.send_bulk(header, payload, (tag, out))

        def finish(operation: int, source: int) -> None:
            self._point_to_points += 1
            self._environment.reply(OperationFinished(operation, self._environment.now_ns(), source))

        def mismatch(message: str) -> None:
            group = self._groups.get(tag)
            if group is not None:
                self.fail(group, Failure("operation-mismatch", message))

        return PointToPoint(tag, control, bulk, finish, mismatch)

    def _start_point_to_point(self, group: Group, command: SendTo | ReceiveFrom) -> None:
        left = command.peer in group.left
        if left and isinstance(command, SendTo):
            self._fail_without_partner(group, command, "it closed the group")
            return
        if command.peer >= 0 and not left and self.link_to(group, command.peer) is None:
            self._fail_without_partner(group, command, "its connection is gone")
            return
        memory = self._environment.memory(command.segment, command.offset, command.size)
        deadline = self._environment.now() + command.timeout_s
        if isinstance(command, SendTo):
            group.point_to_point.send(command, memory, deadline)
        else:
            group.point_to_point.receive(command, memory, deadline)
            self._check_left(group)

    def _fail_without_partner(self, group: Group, command: SendTo | ReceiveFrom, reason: str) -> None:
        failure = Failure("peer-lost", reason, peer=command.peer)
        self.fail(group, failure)
        self._reply_failed(command.operation, failure)

    # frames

    def target(self, link: Link, header: FrameHeader) -> memoryview | None:
        """Return the memory for a bulk payload: tensor memory if that is safe, else a buffer."""
        peer = self.peers.of(link)
        if header.kind is FrameKind.PROBE:
            return self._setup.probe_space(peer, header)
        group = self._groups.get(header.group)
        rank = group.rank_of(peer.worker) if group is not None else None
        if group is None or rank is None or group.failure is not None:
            return None
        if header.kind is not FrameKind.DATA:
            return group.point_to_point.target(rank, header)
        return self._runner.place(group, rank, header)

    def frame(self, link: Link, header: FrameHeader, payload: memoryview) -> None:
        peer = self.peers.of(link)
        if header.kind is FrameKind.DATA:
            group = self._groups.get(header.group)
            rank = group.rank_of(peer.worker) if group is not None else None
            if group is not None and rank is not None and group.failure is None:
                self._runner.arrived(group, rank, header, payload)
        elif header.group == 0:
            self._handle_link_frame(peer, header, payload)
        else:
            self._handle_group_frame(peer, header, payload)

    def _handle_link_frame(self, peer: PeerLink, header: FrameHeader, payload: memoryview) -> None:
        if header.kind is FrameKind.PING:
            self._reply_to_peer(peer, FrameHeader(FrameKind.PONG, first=header.first))
        elif header.kind is FrameKind.PONG:
            if peer.pong(header.first, self._environment.now()):
                for group in list(self._groups.values()):
                    self._setup.advance(group)
        elif header.kind is FrameKind.GOODBYE:
            peer.goodbye = bytes(payload[:500]).decode("utf-8", "replace") or "it left"
        elif header.kind in (FrameKind.PROBE, FrameKind.PROBED):
            self._setup.probe_frame(peer, header, payload)
            for group in list(self._groups.values()):
                self._setup.advance(group)
        else:
            raise ProtocolError(f"{header.kind.name} frame without a group")

    def _handle_group_frame(self, peer: PeerLink, header: FrameHeader, payload: memoryview) -> None:
        group = self._groups.get(header.group)
        if group is None:
            # closed here, or not open yet: only joins are worth storing
            stale = self._early_joins.store(peer.worker, header, bytes(payload), self.generation)
            if stale is not None:
                failure = msgspec.msgpack.encode(self._stale_failure(stale.generation))
                self._reply_to_peer(peer, FrameHeader(FrameKind.FAIL, group=header.group), failure)
            return
        rank = group.rank_of(peer.worker)
        if rank is None:
            raise ProtocolError("a frame for a group that the sender is not in")
        if header.kind is FrameKind.FAIL:
            self._on_remote_failure(group, payload)
        elif group.failure is not None:
            if (
                header.kind is FrameKind.JOIN and group.reported_failure is not None
            ):  # it joined after the failure was sent
                failure = msgspec.msgpack.encode(group.reported_failure)
                self._reply_to_peer(peer, FrameHeader(FrameKind.FAIL, group=group.tag), failure)
        elif header.kind is FrameKind.JOIN:
            self._on_join(group, peer, bytes(payload))
        elif header.kind in (FrameKind.MEASURE, FrameKind.TABLE):
            self._setup.table_frame(group, rank, header.kind, bytes(payload))
        elif header.kind is FrameKind.LEAVE:
            self._on_leave(group, rank)
        elif header.kind is FrameKind.OPEN:
            self._runner.peer_opened(group, rank, header.sequence, bytes(payload))
        elif header.kind is FrameKind.ASK:
            known = group.find_call(header.sequence)
            started = int(header.sequence in group.started)
            self._reply_to_peer(
                peer, FrameHeader(FrameKind.TELL, 0, group.tag, header.sequence, started), known
            )
        elif header.kind is FrameKind.TELL:
            self._runner.on_call_reply(group, rank, header, bytes(payload))
        else:
            group.point_to_point.frame(rank, header, payload)

    def _reply_to_peer(self, peer: PeerLink, header: FrameHeader, payload: bytes = b"") -> None:
        """Send a reply to a peer.

        A peer that sends requests without reading gets no reply, so our memory does not grow.
        """
        if peer.link.writer.control_bytes < _MAX_REPLY_BYTES:
            peer.link.send(header, payload)

    def _on_leave(self, group: Group, rank: int) -> None:
        """Record that a peer closed the group with nothing in flight.

        All operations that it ever started are done, or their bytes are on the way.
        """
        group.left.add(rank)
        self._check_left(group)

    def _check_left(self, group: Group) -> None:
        """Fail the group if an operation waits for a peer that left before starting it."""
        for rank in sorted(group.left):
            missed = any(
                rank in execution.peers and rank not in execution.started_peers
                for execution in group.running.values()
            )
            if missed or group.point_to_point.is_stranded(rank, alone=len(group.left) == group.world - 1):
                self.fail(group, Failure("peer-lost", "it closed the group", peer=rank))
                return

    def sent(self, link: Link, token: object) -> None:
        if isinstance(token, SendToken):
            self._runner.sent(token)
        elif isinstance(token, tuple):
            owner = self._groups.get(token[0])
            if owner is not None and owner.failure is None:
                owner.point_to_point.sent(token[1])

    # links

    def link_up(self, worker: bytes, link: Link, node: bytes = b"") -> None:
        """Add a link that has proved its worker and machine."""
        peer = self.peers.add(worker, link, node)
        peer.ping(self._environment.now())
        for group in list(self._groups.values()):
            if group.failure is None and group.rank_of(worker) is not None:
                self._join(group, peer)

    def link_down(self, link: Link) -> None:
        peer = self.peers.remove(link)
        if peer is None:
            return
        reason = peer.goodbye or link.closed or "its connection closed"
        log.info("link to %s down: %s", peer.worker.hex()[:8], reason)
        if self.peers.get(peer.worker) is None:
            self._early_joins.forget(peer.worker)
        for group in list(self._groups.values()):
            rank = group.rank_of(peer.worker)
            if rank is not None and (rank not in group.left or group.waits_for(rank)):
                self.fail(group, Failure("peer-lost", reason, peer=rank))

    def unreachable(self, worker: bytes, reason: str) -> None:
        """Fail the groups that wait for a worker which could not be dialled."""
        for group in list(self._groups.values()):
            rank = group.rank_of(worker)
            if rank is not None and not group.opened:
                self.fail(group, Failure("peer-lost", reason, peer=rank))

    # failure

    def fail(self, group: Group, failure: Failure, *, elsewhere: Failure | None = None) -> None:
        """Fail the group here and send the reason to every member."""
        if group.failure is not None:
            return
        group.failure = truncate_failure(failure)
        group.reported_failure = truncate_failure(elsewhere or failure)
        self.failures += 1
        log.info("group %s failed: %s", group.command.name, failure)
        self._send_to_all(
            group,
            FrameHeader(FrameKind.FAIL, group=group.tag),
            msgspec.msgpack.encode(group.reported_failure),
        )
        self._fail_operations(group, group.failure)

    def _fail_operations(self, group: Group, failure: Failure) -> None:
        for rank in group.others():
            peer = self.peers.get(group.workers[rank])
            if peer is not None:
                # before the reply: the worker may reuse the memory at once
                peer.link.forget(group.tag)
        self._runner.forget(group)
        operations = [execution.operation for execution in group.running.values()]
        operations += group.point_to_point.pending()
        group.running.clear()
        group.early.clear()
        group.point_to_point = self._make_point_to_point(group.tag)
        if not group.opened:
            group.opened = group.refused = True
            self._environment.reply(GroupNotOpened(group.command.request, failure))
        for operation in operations:
            self._reply_failed(operation, failure)

    def fail_all(self, reason: str) -> None:
        """Fail every group, because this worker can take part in no operation."""
        for group in list(self._groups.values()):
            self.fail(group, Failure("peer-lost", reason, peer=group.rank))

    def _on_remote_failure(self, group: Group, payload: memoryview) -> None:
        failure = decode_peer(bytes(payload), Failure)
        if not is_plausible(failure, group.world):
            raise ProtocolError("malformed failure report")
        if group.failure is None:
            group.failure = group.reported_failure = truncate_failure(failure)
            self.failures += 1
            self._fail_operations(group, group.failure)

    def _reply_failed(self, operation: int, failure: Failure) -> None:
        self._environment.reply(OperationFailed(operation, failure))

    def _stale_failure(self, generation: int) -> Failure:
        return Failure(
            "operation-aborted",
            f"start {generation} of the run is over; the run is at start {self.generation}",
        )

    def _send_to_all(self, group: Group, header: FrameHeader, payload: bytes = b"") -> None:
        for rank in group.others():
            link = self.link_to(group, rank)
            if link is not None:
                link.send(header, payload)

    def link_to(self, group: Group, rank: int) -> Link | None:
        peer = self.peers.get(group.workers[rank])
        return peer.link if peer is not None else None

    @property
    def operations(self) -> int:
        return self._runner.operations + self._point_to_points

    @property
    def bytes_by_group(self) -> dict[int, int]:
        return self._runner.bytes_by_group

    # time

    def tick(self) -> None:
        """Check heartbeats, silence, deadlines and stalls. The loop calls this several times a second."""
        now = self._environment.now()
        for peer, reason in self.peers.tick(now):
            peer.link.close(reason)
        for group in list(self._groups.values()):
            if group.failure is not None:
                if group.refused and now >= group.deadline:
                    self._remove_group(group)
                continue
            if not group.opened and now >= group.deadline:
                self.fail(group, group.open_timeout_failure())
                continue
            self._runner.check_progress(group, now)
            self._check_messages(group, now)

    def _check_messages(self, group: Group, now: float) -> None:
        """Fail the receives that fail alone and have timed out, or the group if another message has."""
        for operation, failure in group.point_to_point.take_expired(now):
            self._reply_failed(operation, failure)
        late = group.point_to_point.find_timeout(now)
        if late is not None:
            self.fail(group, late)
