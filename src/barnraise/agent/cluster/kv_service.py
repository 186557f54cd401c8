"""This machine's replicas: of the key-value store, and of the journals on the disks.

`barnraise.kvstore` decides; this module only does the input and output.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from barnraise.agent import protocol
from barnraise.agent.context import AgentContext
from barnraise.agent.journal_storage import JournalStorage
from barnraise.agent_client.kv_messages import (
    ClusterRequest,
    ClusterResponse,
    KvDenied,
    KvRequest,
    KvResponse,
    Operation,
    Result,
    WatchKey,
    encode,
)
from barnraise.core.errors import MembershipError, ProtocolError
from barnraise.identity import NodeId
from barnraise.kvstore import (
    Effect,
    KvReplica,
    ReplicaAnswer,
    ReplicaNote,
    ReplicaSend,
    ReplicaView,
    decode_message,
    encode_message,
)
from barnraise.kvstore.journals import JOURNALS, refuse_journal_operation
from barnraise.kvstore.messages import ForwardedRequest
from barnraise.kvstore.store import IN_MEMORY
from barnraise.membership.consensus.paxos import PaxosDecision
from barnraise.membership.consensus.quorum import is_quorum
from barnraise.membership.view import MembershipView, read_view

_TICK_S = 0.2
_BRANCH = 1 << 24  # a view of a later branch is newer than any of an earlier one

_log = logging.getLogger(__name__)


class KvService:
    """Connects a replica with the network and with clients on this machine.

    ``disk``: the replica is one of the journals, and is saved there before any message or answer leaves.
    """

    def __init__(self, agent: AgentContext, disk: JournalStorage | None = None) -> None:
        self._agent = agent
        self._disk = disk
        self._rules = IN_MEMORY if disk is None else JOURNALS
        self._kind = protocol.BOARD if disk is None else protocol.JOURNAL
        self._fault = ""  # why the disk cannot be used: then nothing is sent or answered
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[object, asyncio.Future[Result]] = {}
        self._replica = self._new()
        self.view_changed()

    def reset(self) -> None:
        """Start an empty replica for another cluster."""
        if self._disk is not None:
            self._disk.clear()
        self._replica = self._new()

    def view_changed(self) -> None:
        """Tell the replica the current membership view."""
        member = self._agent.member
        if member.record.decided.number:
            view = _replica_view(member.record.decided, member.view)
            earlier = () if self._disk is None else self._missed_views()
            self._perform(self._replica.on_view_change(view, self._loop.time(), earlier))

    def _missed_views(self) -> list[ReplicaView]:
        """Return the views before the newest one that the replica was not told, newest first.

        The machines that were in them may have entries that no member of the newest view has.
        """
        views = []
        for link in reversed(self._agent.member.history.chain[:-1]):
            if _number(link.decision) < self._replica.first_unknown_view:
                break
            views.append(_replica_view(link.decision, read_view(link.decision)))
        return views

    def received(self, node: NodeId, body: bytes | memoryview) -> None:
        """Handle a message of another replica; raise ProtocolError if it comes from a guest."""
        if self._agent.member.history.role(node.raw) != "owner":
            raise ProtocolError(f"{node.short} is a guest and holds no replica of the {self._rules.noun}")
        message = decode_message(bytes(body))
        if self._disk is not None and isinstance(message, ForwardedRequest):
            reason = refuse_journal_operation(message.operation)
            if reason is not None:
                raise ProtocolError(f"{node.short} sent a request that is not one of a journal: {reason}")
        self._perform(self._replica.receive(node.raw, message, self._loop.time()))

    async def run(self) -> None:
        """Advance the replica's clock until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._perform(self._replica.tick(self._loop.time()))

    async def answer(self, request: KvRequest | ClusterRequest) -> bytes:
        """Answer a request of a process on this machine."""
        if isinstance(request, ClusterRequest):
            return encode(self._cluster())
        return encode(KvResponse(await self.request(request.operation, request.patience_s)))

    async def request(self, operation: Operation | WatchKey, patience_s: float) -> Result:
        """Execute an operation and return its result; after ``patience_s`` the result is a denial."""
        if self._fault:
            return KvDenied("late", self._fault, "Free some disk space, then start the agent again.")
        ticket = object()
        future: asyncio.Future[Result] = self._loop.create_future()
        self._waiting[ticket] = future
        try:
            self._perform(self._replica.request(operation, ticket, self._loop.time(), patience_s))
            return await future
        finally:
            del self._waiting[ticket]
            self._replica.cancel(ticket)

    def _cluster(self) -> ClusterResponse:
        member = self._agent.member
        working = [present.node for present in member.view.members if present.works]
        me = self._agent.me.raw
        is_in = member.is_member
        return ClusterResponse(
            world=len(working) if is_in else 0,
            node_index=working.index(me) if is_in and me in working else -1,
            view=member.record.decided.number,
        )

    def _new(self) -> KvReplica:
        agent, saved = self._agent, None
        if self._disk is not None:
            saved = self._disk.load(agent.log.cluster)
            if saved is None:
                self._disk.clear()  # of another cluster
        try:
            return KvReplica(
                agent.me.raw,
                _has_quorum,
                secrets.token_bytes(16),
                # If the view lists this start of ours, we have forgotten nothing.
                last_view=_number(agent.member.record.decided) - agent.member.is_member,
                name=lambda raw: agent.name_of(NodeId(raw)),
                rules=self._rules,
                saved=saved,
                is_gone=lambda raw: agent.log.role(NodeId(raw)) is None,
            )
        except ProtocolError as error:  # of a damaged snapshot
            if self._disk is None:
                raise
            raise self._disk.broken(error.message) from error

    def _save(self) -> None:
        """Save what the disk lacks; after a failure, memory is ahead of the disk and nothing may leave."""
        if self._disk is None or self._fault:
            return
        change = self._replica.unsaved(whole=self._disk.wants_snapshot)
        if change is None:
            return
        try:
            self._disk.save(self._agent.log.cluster, change)
        except MembershipError as error:
            self._fault = error.message
            self._agent.report_event(f"the journals of this machine stop: {error.message}")
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(KvDenied("late", error.message, error.hint))

    def _perform(self, effects: list[Effect]) -> None:
        self._save()
        if self._fault:
            return
        for effect in effects:
            match effect:
                case ReplicaSend():
                    self._agent.send_bulk(NodeId(effect.to), self._kind + encode_message(effect.message))
                case ReplicaAnswer():
                    future = self._waiting.get(effect.ticket)
                    if future is not None and not future.done():
                        future.set_result(effect.result)
                case ReplicaNote():
                    _log.info("%s: %s", self._rules.noun, effect.text)


def _number(decided: PaxosDecision) -> int:
    return decided.branch * _BRANCH + decided.number


def _replica_view(decided: PaxosDecision, view: MembershipView) -> ReplicaView:
    """Return the view of the replicas: guests hold none, because it has keys of others' runs."""
    return ReplicaView(_number(decided), view.voters, frozenset(view.voters), forced=bool(view.without))


def _has_quorum(view: ReplicaView, agreeing: set[bytes]) -> bool:
    return is_quorum([node for node in view.members if node in view.voters], agreeing)
