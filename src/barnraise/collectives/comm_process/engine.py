"""The mover's decisions: groups, operations, liveness. It touches no socket and no clock.

Events come in through methods (a command, a frame, a link up or down, a tick); effects go out through the
``EngineEnvironment`` and the links. The process gives it real ones, the simulation in-memory ones.
"""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

import msgspec

from barnraise.collectives.comm_process.decode import decoded, possible, shortened
from barnraise.collectives.comm_process.group import Group, JoinBody, group_tag
from barnraise.collectives.comm_process.group_setup import GroupSetup
from barnraise.collectives.comm_process.links.early_joins import EarlyJoins
from barnraise.collectives.comm_process.peers import Clocks, PeerLink, Peers
from barnraise.collectives.comm_process.point_to_point import OutgoingMessage, PointToPoint
from barnraise.collectives.comm_process.runner import Runner, SendQueue
from barnraise.collectives.messages import (
    AbortGroup,
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

log = logging.getLogger("barnraise.mover")

_ANSWERS = 1 << 20  # bytes of control frames that may wait for a peer before its questions are dropped


class EngineEnvironment(Protocol):
    """What the engine needs of the world."""

    def now(self) -> float: ...
    def now_ns(self) -> int: ...
    def reply(self, message: Reply) -> None: ...
    def dial(self, member: GroupMember) -> None: ...
    def memory(self, segment: int, offset: int, size: int) -> memoryview: ...


class CommEngine:
    """All groups of one worker."""

    def __init__(
        self, worker: bytes, run: str, generation: int, clocks: Clocks, world: EngineEnvironment
    ) -> None:
        self.worker = worker
        self.run = run
        self.generation = generation
        self._world = world
        self._groups: dict[int, Group] = {}
        self._early_joins = EarlyJoins()
        self._runner = Runner(world, self)
        self.peers = Peers(clocks, world.now)
        self._opening = GroupSetup(self.peers, world, self._opened)
        self.failures = 0
        self._point_to_points = 0

    # commands of the worker

    def command(
        self, message: OpenGroup | CloseGroup | AbortGroup | StartOperation | SendTo | ReceiveFrom
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
        elif group is None:
            self._refuse(message.operation, Failure("operation-aborted", "the group is closed"))
        elif group.failure is not None:
            self._refuse(message.operation, group.failure)
        elif isinstance(message, StartOperation):
            self._runner.start(group, message)
        else:
            self._point_to_point(group, message)

    def _open(self, command: OpenGroup) -> None:
        now = self._world.now()
        tag = group_tag(self.run, command.generation, command.name)
        if command.generation < self.generation:
            self._world.reply(GroupNotOpened(command.request, self._stale(command.generation)))
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
            if group.failure is not None:
                return  # somebody's failure was here before us
            if peer is not None:
                self._join(group, peer)
            elif self.worker > member.worker:
                self._world.dial(member)
        self._opening.advance(group)

    def _join(self, group: Group, peer: PeerLink) -> None:
        peer.link.send(FrameHeader(FrameKind.JOIN, group=group.tag), group.join_body())
        early = self._early_joins.take(peer.worker, group.tag)
        if isinstance(early, Failure):
            lost = Failure("peer-lost", "it gave the group up", peer=group.workers.index(peer.worker))
            self.fail(group, early if possible(early, group.world) else lost)
        elif early is not None:
            self._joined(group, peer, early)

    def _joined(self, group: Group, peer: PeerLink, payload: bytes) -> None:
        rank = group.rank_of(peer.worker)
        if rank is None or group.failure is not None:
            return
        problem = group.check_join(decoded(payload, JoinBody), rank)
        if problem is not None:
            self.fail(group, Failure("operation-mismatch", f"the ranks do not agree on the group: {problem}"))
            return
        group.joined.add(rank)
        self._opening.advance(group)

    def _opened(self, group: Group) -> None:
        log.info("group %s opened: %s", group.command.name, group.table)

    def _close(self, group: Group) -> None:
        """Leave. The others go on with what this rank has done its part of; the rest is lost to them."""
        if group.failure is None and (group.running or group.parcels.pending()):
            lost = Failure("peer-lost", "it closed the group", peer=group.rank)
            self._tell(group, FrameHeader(FrameKind.FAIL, group=group.tag), msgspec.msgpack.encode(lost))
        self._end_operations(group, Failure("operation-aborted", "this process closed the group"))
        self._tell(group, FrameHeader(FrameKind.LEAVE, group=group.tag))
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
                peer.link.forget(group.tag)
        self._groups.pop(group.tag, None)
        self._runner.bytes_by_group.pop(group.tag, None)

    # operations

    def _parcels(self, tag: int) -> PointToPoint:
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
            self._world.reply(OperationFinished(operation, self._world.now_ns(), source))

        def mismatch(message: str) -> None:
            group = self._groups.get(tag)
            if group is not None:
                self.fail(group, Failure("operation-mismatch", message))

        return PointToPoint(tag, control, bulk, finish, mismatch)

    def _point_to_point(self, group: Group, command: SendTo | ReceiveFrom) -> None:
        left = command.peer in group.left
        if left and isinstance(command, SendTo):
            self._no_partner(group, command, "it closed the group")
            return
        if command.peer >= 0 and not left and self.link_to(group, command.peer) is None:
            self._no_partner(group, command, "its connection is gone")
            return
        memory = self._world.memory(command.segment, command.offset, command.size)
        deadline = self._world.now() + command.timeout_s
        if isinstance(command, SendTo):
            group.parcels.send(command, memory, deadline)
        else:
            group.parcels.receive(command, memory, deadline)
            self._check_left(group)

    def _no_partner(self, group: Group, command: SendTo | ReceiveFrom, why: str) -> None:
        failure = Failure("peer-lost", why, peer=command.peer)
        self.fail(group, failure)
        self._refuse(command.operation, failure)

    # frames

    def target(self, link: Link, header: FrameHeader) -> memoryview | None:
        """Where a bulk payload goes: tensor memory where that is safe, else a buffer."""
        peer = self.peers.of(link)
        if header.kind is FrameKind.PROBE:
            return self._opening.probe_space(peer, header)
        group = self._groups.get(header.group)
        rank = group.rank_of(peer.worker) if group is not None else None
        if group is None or rank is None or group.failure is not None:
            return None
        if header.kind is not FrameKind.DATA:
            return group.parcels.target(rank, header)
        return self._runner.place(group, rank, header)

    def frame(self, link: Link, header: FrameHeader, payload: memoryview) -> None:
        peer = self.peers.of(link)
        if header.kind is FrameKind.DATA:
            group = self._groups.get(header.group)
            rank = group.rank_of(peer.worker) if group is not None else None
            if group is not None and rank is not None and group.failure is None:
                self._runner.arrived(group, rank, header, payload)
        elif header.group == 0:
            self._link_frame(peer, header, payload)
        else:
            self._group_frame(peer, header, payload)

    def _link_frame(self, peer: PeerLink, header: FrameHeader, payload: memoryview) -> None:
        if header.kind is FrameKind.PING:
            self._answer(peer, FrameHeader(FrameKind.PONG, first=header.first))
        elif header.kind is FrameKind.PONG:
            if peer.pong(header.first, self._world.now()):
                for group in list(self._groups.values()):
                    self._opening.advance(group)
        elif header.kind is FrameKind.GOODBYE:
            peer.goodbye = bytes(payload[:500]).decode("utf-8", "replace") or "it left"
        elif header.kind in (FrameKind.PROBE, FrameKind.PROBED):
            self._opening.probe_frame(peer, header, payload)
            for group in list(self._groups.values()):
                self._opening.advance(group)
        else:
            raise ProtocolError(f"{header.kind.name} frame without a group")

    def _group_frame(self, peer: PeerLink, header: FrameHeader, payload: memoryview) -> None:
        group = self._groups.get(header.group)
        if group is None:
            # closed here, or not open yet: only its beginning is worth keeping
            stale = self._early_joins.keep(peer.worker, header, bytes(payload), self.generation)
            if stale is not None:
                failure = msgspec.msgpack.encode(self._stale(stale.generation))
                self._answer(peer, FrameHeader(FrameKind.FAIL, group=header.group), failure)
            return
        rank = group.rank_of(peer.worker)
        if rank is None:
            raise ProtocolError("a frame for a group that the sender is not in")
        if header.kind is FrameKind.FAIL:
            self._remote_failure(group, payload)
        elif group.failure is not None:
            if header.kind is FrameKind.JOIN and group.told is not None:  # it came too late to hear of it
                failure = msgspec.msgpack.encode(group.told)
                self._answer(peer, FrameHeader(FrameKind.FAIL, group=group.tag), failure)
        elif header.kind is FrameKind.JOIN:
            self._joined(group, peer, bytes(payload))
        elif header.kind in (FrameKind.MEASURE, FrameKind.TABLE):
            self._opening.table_frame(group, rank, header.kind, bytes(payload))
        elif header.kind is FrameKind.LEAVE:
            self._left(group, rank)
        elif header.kind is FrameKind.OPEN:
            self._runner.peer_opened(group, rank, header.sequence, bytes(payload))
        elif header.kind is FrameKind.ASK:
            known = group.called(header.sequence)
            started = int(header.sequence in group.started)
            self._answer(peer, FrameHeader(FrameKind.TELL, 0, group.tag, header.sequence, started), known)
        elif header.kind is FrameKind.TELL:
            self._runner.told(group, rank, header, bytes(payload))
        else:
            group.parcels.frame(rank, header, payload)

    def _answer(self, peer: PeerLink, header: FrameHeader, payload: bytes = b"") -> None:
        """What a peer asked for; one that asks without reading gets nothing, and our memory does not grow."""
        if peer.link.writer.control_bytes < _ANSWERS:
            peer.link.send(header, payload)

    def _left(self, group: Group, rank: int) -> None:
        """It closed the group with nothing under way: all it ever started is done or on its way to us."""
        group.left.add(rank)
        self._check_left(group)

    def _check_left(self, group: Group) -> None:
        """Fail if something waits for a start that will never come."""
        for rank in sorted(group.left):
            missed = any(
                rank in execution.peers and rank not in execution.started_peers
                for execution in group.running.values()
            )
            if missed or group.parcels.stranded(rank, alone=len(group.left) == group.world - 1):
                self.fail(group, Failure("peer-lost", "it closed the group", peer=rank))
                return

    def sent(self, link: Link, token: object) -> None:
        if isinstance(token, SendQueue):
            self._runner.sent(token)
        elif isinstance(token, tuple):
            owner = self._groups.get(token[0])
            if owner is not None and owner.failure is None:
                owner.parcels.sent(token[1])

    # links

    def link_up(self, worker: bytes, link: Link, node: bytes = b"") -> None:
        """A link has proved that the other end is this worker, on this machine."""
        peer = self.peers.add(worker, link, node)
        peer.ping(self._world.now())
        for group in list(self._groups.values()):
            if group.failure is None and group.rank_of(worker) is not None:
                self._join(group, peer)

    def link_down(self, link: Link) -> None:
        peer = self.peers.remove(link)
        if peer is None:
            return
        why = peer.goodbye or link.closed or "its connection closed"
        log.info("link to %s down: %s", peer.worker.hex()[:8], why)
        if self.peers.get(peer.worker) is None:
            self._early_joins.forget(peer.worker)
        for group in list(self._groups.values()):
            rank = group.rank_of(peer.worker)
            if rank is not None and (rank not in group.left or group.awaits(rank)):
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
        group.failure = shortened(failure)
        group.told = shortened(elsewhere or failure)
        self.failures += 1
        log.info("group %s failed: %s", group.command.name, failure)
        self._tell(group, FrameHeader(FrameKind.FAIL, group=group.tag), msgspec.msgpack.encode(group.told))
        self._end_operations(group, group.failure)

    def _end_operations(self, group: Group, failure: Failure) -> None:
        for rank in group.others():
            peer = self.peers.get(group.workers[rank])
            if peer is not None:
                # before the worker hears of it: it may reuse the memory at once
                peer.link.forget(group.tag)
        self._runner.forget(group)
        operations = [execution.operation for execution in group.running.values()]
        operations += group.parcels.pending()
        group.running.clear()
        group.early.clear()
        group.parcels = self._parcels(group.tag)
        if not group.opened:
            group.opened = group.refused = True
            self._world.reply(GroupNotOpened(group.command.request, failure))
        for operation in operations:
            self._refuse(operation, failure)

    def fail_everything(self, why: str) -> None:
        """This worker can take part in nothing more; the others must not wait for it."""
        for group in list(self._groups.values()):
            self.fail(group, Failure("peer-lost", why, peer=group.rank))

    def _remote_failure(self, group: Group, payload: memoryview) -> None:
        failure = decoded(bytes(payload), Failure)
        if not possible(failure, group.world):
            raise ProtocolError("malformed failure report")
        if group.failure is None:
            group.failure = group.told = shortened(failure)
            self.failures += 1
            self._end_operations(group, group.failure)

    def _refuse(self, operation: int, failure: Failure) -> None:
        self._world.reply(OperationFailed(operation, failure))

    def _stale(self, generation: int) -> Failure:
        return Failure(
            "operation-aborted", f"generation {generation} is over, this run is at {self.generation}"
        )

    def _tell(self, group: Group, header: FrameHeader, payload: bytes = b"") -> None:
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
        """Called several times a second: heartbeats, silence, deadlines, stalls."""
        now = self._world.now()
        for peer, why in self.peers.tick(now):
            peer.link.close(why)
        for group in list(self._groups.values()):
            if group.failure is not None:
                if group.refused and now >= group.deadline:
                    self._drop(group)
                continue
            if not group.opened and now >= group.deadline:
                self.fail(group, group.not_opened())
                continue
            self._runner.watch(group, now)
            late = group.parcels.late(now)
            if late is not None:
                self.fail(group, late)
