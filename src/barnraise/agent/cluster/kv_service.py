"""This machine's replicas: of the key-value store, and of the journals on the disks.

`barnraise.kvstore` decides; this module only does the input and output.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor

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
from barnraise.core import metrics
from barnraise.core.errors import MembershipError, ProtocolError
from barnraise.core.metrics import catalogue
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
from barnraise.kvstore.messages import ForwardedRequest, SavedReplica
from barnraise.kvstore.store import IN_MEMORY
from barnraise.membership.consensus.paxos import PaxosDecision
from barnraise.membership.consensus.quorum import is_quorum
from barnraise.membership.view import MembershipView, read_view

_TICK_S = 0.2
_GRACE_S = 1.0  # after the patience of a request, for its answer to pass the disk
_MAX_HELD = 1000  # more messages than this are dropped, as a lost connection would drop them
_BRANCH = 1 << 24  # a view of a later branch is newer than any of an earlier one

_log = logging.getLogger(__name__)


class KvService:
    """Connects a replica with the network and with clients on this machine.

    ``disk``: the replica is one of the journals, and is saved there before any message or answer leaves.
    A thread writes, so that a slow disk does not stop the agent. Effects wait in order until the state that
    they follow from is saved. Nothing happens before the first call of `view_changed`.
    """

    def __init__(self, agent: AgentContext, disk: JournalStorage | None = None) -> None:
        self._agent = agent
        self._disk = disk
        self._rules = IN_MEMORY if disk is None else JOURNALS
        self._kind = protocol.BOARD if disk is None else protocol.JOURNAL
        self._fault: KvDenied | None = None  # after a fault nothing is saved, sent or answered
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[object, asyncio.Future[Result]] = {}
        self._writer = ThreadPoolExecutor(1, "journals")
        self._saving: asyncio.Future[None] | None = None
        self._saving_since = 0.0
        self._to_perform: list[Effect] = []  # after the save that is under way
        self._held: list[Effect] = []  # after the next save
        saved = None if disk is None else disk.load(agent.log.cluster)
        self._is_foreign = saved is None  # the disk has no replica, or one of another cluster
        self._replica = self._new(saved)
        self._counted = self._replica.op_number

    def reset(self) -> None:
        """Start an empty replica for another cluster; its first save replaces the other contents."""
        self._is_foreign = True
        self._to_perform, self._held = [], []
        self._replica = self._new(None)
        self._deny_all(KvDenied("late", "this machine joins another cluster", "Try again."))

    async def stop(self) -> None:
        """Wait for the save that is under way; nothing is saved, sent or answered after that."""
        self._fail(KvDenied("late", "the agent of this machine stops", "Start it again: barnraise up"))
        if self._saving is not None:
            await asyncio.wait([self._saving])
        self._writer.shutdown()

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
        if self._fault is not None:
            return self._fault
        ticket = object()
        future: asyncio.Future[Result] = self._loop.create_future()
        self._waiting[ticket] = future
        try:
            self._perform(self._replica.request(operation, ticket, self._loop.time(), patience_s))
            while self._disk is not None and not future.done():
                await asyncio.wait([future], timeout=patience_s + _GRACE_S)
                if not future.done() and self._saving is not None:
                    return self._denied_by_disk()
            return await future
        finally:
            del self._waiting[ticket]
            self._replica.cancel(ticket)

    def _denied_by_disk(self) -> KvDenied:
        """Return the denial of a request whose answer waits for a save."""
        seconds = self._loop.time() - self._saving_since
        return KvDenied(
            "late",
            f"the journals wait for the disk of this machine, which has been saving for {seconds:.0f} s",
            "Wait, and look for another program that writes to this disk.",
        )

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

    def _new(self, saved: SavedReplica | None) -> KvReplica:
        agent = self._agent
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

    def _perform(self, effects: list[Effect]) -> None:
        """Perform effects, but not before the state that they follow from is on the disk."""
        self._count_commits()
        if self._fault is not None:
            return
        if self._saving is None:
            self._held += effects
            self._save()
            return
        for effect in effects:
            if not isinstance(effect, ReplicaSend) or len(self._held) < _MAX_HELD:
                self._held.append(effect)

    def _count_commits(self) -> None:
        """Count what was committed since the last call; another log may begin at a lower number."""
        number = self._replica.op_number
        if number > self._counted:
            metrics.counter(catalogue.STORE_COMMITS, self._rules.noun).inc(number - self._counted)
        self._counted = number

    def _save(self) -> None:
        """Start to save what the disk lacks; without such a change, perform what was held."""
        effects, self._held = self._held, []
        change = None
        if self._disk is not None:
            change = self._replica.unsaved(whole=self._is_foreign or self._disk.wants_snapshot)
        if self._disk is None or change is None:
            self._perform_now(effects)
            return
        self._is_foreign = False
        self._to_perform, self._saving_since = effects, self._loop.time()
        cluster = self._agent.log.cluster
        self._saving = self._loop.run_in_executor(self._writer, self._disk.save, cluster, change)
        self._saving.add_done_callback(self._saved)

    def _saved(self, saving: asyncio.Future[None]) -> None:
        """Perform what waited for a save, and start the next one.

        After a failure, memory is ahead of the disk and nothing may leave.
        """
        assert self._disk is not None
        self._saving = None
        error = saving.exception()
        if self._fault is not None:
            return
        if error is not None:
            broken = error if isinstance(error, MembershipError) else self._disk.broken(str(error))
            self._agent.report_event(f"the journals of this machine stop: {broken.message}")
            self._fail(KvDenied("late", broken.message, broken.hint))
            return
        effects, self._to_perform = self._to_perform, []
        self._perform_now(effects)
        self._save()

    def _fail(self, denial: KvDenied) -> None:
        self._fault = denial
        self._to_perform, self._held = [], []
        self._deny_all(denial)

    def _deny_all(self, denial: KvDenied) -> None:
        for ticket in self._waiting:
            self._answer(ReplicaAnswer(ticket, denial))

    def _answer(self, answer: ReplicaAnswer) -> None:
        future = self._waiting.get(answer.ticket)
        if future is not None and not future.done():
            future.set_result(answer.result)

    def _perform_now(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ReplicaSend():
                    self._agent.send_bulk(NodeId(effect.to), self._kind + encode_message(effect.message))
                case ReplicaAnswer():
                    self._answer(effect)
                case ReplicaNote():
                    _log.info("%s: %s", self._rules.noun, effect.text)


def _number(decided: PaxosDecision) -> int:
    return decided.branch * _BRANCH + decided.number


def _replica_view(decided: PaxosDecision, view: MembershipView) -> ReplicaView:
    """Return the view of the replicas: guests hold none, because it has keys of others' runs."""
    return ReplicaView(_number(decided), view.voters, frozenset(view.voters), forced=bool(view.without))


def _has_quorum(view: ReplicaView, agreeing: set[bytes]) -> bool:
    return is_quorum([node for node in view.members if node in view.voters], agreeing)
