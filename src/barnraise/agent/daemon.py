"""The agent of a machine: builds its services and connects them. Decisions are made by the services."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial

import msgspec

from barnraise import __version__
from barnraise.agent import protocol
from barnraise.agent.audit_trail import AuditTrail
from barnraise.agent.cluster.admission import admit, has_next_key, renew_lost_key, use_next_key
from barnraise.agent.cluster.connection_policy import ClusterConnectionPolicy
from barnraise.agent.cluster.connections import AgentConnections, PeerAddress
from barnraise.agent.cluster.discovery import PeerDiscovery
from barnraise.agent.cluster.kv_service import KvService
from barnraise.agent.cluster.link_probe import LinkProber
from barnraise.agent.cluster.machine_names import (
    NamedMachine,
    check_name_is_free,
    find_machine,
    name_clashes,
    shown_name,
)
from barnraise.agent.cluster.pairing_server import PairingServer
from barnraise.agent.cluster.peer_store import PeerStore
from barnraise.agent.diagnostics.reachability import ReachabilityProber
from barnraise.agent.disk.cleaner import Cleaner
from barnraise.agent.journal_storage import JournalStorage
from barnraise.agent.limits.remote_pause import RemotePause
from barnraise.agent.limits.service import LimitsService
from barnraise.agent.metrics.service import MetricsService
from barnraise.agent.notifications.service import NotificationService
from barnraise.agent.page.service import PageService
from barnraise.agent.power.suspend_events import watch_sleep
from barnraise.agent.queue.service import QueueService
from barnraise.agent.runs.service import RunService
from barnraise.core import metrics
from barnraise.core.config import Settings, state_directory
from barnraise.core.errors import AgentError, MembershipError, ProtocolError
from barnraise.core.flow.events import ChangeEvent
from barnraise.core.logs.audit_log import AuditLog
from barnraise.core.metrics import catalogue
from barnraise.core.sanitize import is_printable, printable
from barnraise.identity import NodeId, NodeKey, delegate
from barnraise.identity.private_file import private_directory
from barnraise.identity.trust import NAME_LENGTH, SignedEntry, TrustLog, check_name, encode_entry
from barnraise.membership.consensus.paxos import BRANCH_BITS, founded
from barnraise.membership.effects import Effect, LogNote, SaveState, SendMessage, ViewChanged
from barnraise.membership.history import StoredHistory
from barnraise.membership.messages import Heartbeat
from barnraise.membership.node import TICK_S, MembershipNode
from barnraise.membership.storage import MembershipStorage
from barnraise.membership.view import PresentMember, first
from barnraise.runs.participants import trusted_nodes
from barnraise.topology import Machine, NodeFacts, decode_machine
from barnraise.transport.addresses import own_addresses as machine_addresses
from barnraise.transport.control.dial import AGENT_RUN, AgentTls, ControlConnection
from barnraise.transport.listener.acceptor import ConnectionRefusal
from barnraise.transport.listener.listener import Listener
from barnraise.transport.listener.preface import ROUTE_AGENT_BULK, ROUTE_AGENT_SHIP, Preface

_NAME_FACT = "name"
_GOODBYE_S = 2.0
_HANDOVER_S = 0.4  # the next primary of the store may need our copy
_KEPT_EVENTS = 200
_SHORT_LINK_S = 3.0
_AGAIN_S = 2.0

_log = logging.getLogger(__name__)


class Agent:
    """One machine's agent; between ``start`` and ``stop`` the machine is part of its cluster."""

    def __init__(self, settings: Settings, *, witness: bool = False) -> None:
        self.settings = settings
        self.directory = private_directory(state_directory(settings))
        self.key = NodeKey.load_or_create(self.directory / "node.key")
        self.me = self.key.id
        self.listener = Listener(settings, policy=ClusterConnectionPolicy(self))
        self.audit = AuditLog(self.directory)
        self.audit_trail = AuditTrail(self.audit, self.name_of)
        self.events: deque[str] = deque(maxlen=_KEPT_EVENTS)
        self.on_event: Callable[[str], None] | None = None
        self.on_request: Callable[[bytes, str], Awaitable[bytes]] | None = None
        self.stop_requested = asyncio.Event()
        self.membership_lock = asyncio.Lock()  # no admission while this machine joins another cluster
        self.removed_by = ""
        self.leaves_cluster = False
        self.rotates_key = False  # the cluster is asked to decide for a new key
        self.changes_key = False  # the agent starts again with its new key
        self._broken = False
        self._epoch = 0
        self.is_alone_with_psk = False  # with a pre-shared key, and no machine found yet
        self._works = not witness
        self._tasks: set[asyncio.Future[None]] = set()
        self._view_event = ChangeEvent()
        self._name_clashes: list[str] = []
        self._linked_at: dict[NodeId, float] = {}

    async def start(self) -> None:
        """Start all services; raise ListenerError if another agent runs here."""
        self._loop = asyncio.get_running_loop()
        self.started = self._loop.time()
        self.incarnation = secrets.token_bytes(16)
        self.storage = MembershipStorage(self.directory)
        if renew_lost_key(self.directory, self.storage):
            self.key = NodeKey.load_or_create(self.directory / "node.key")
            self.me = self.key.id
            self.report_event("cluster.db is missing: this machine starts as a new one, with a new id")
            self.audit.write("identity-changed", subject=self.me.short, detail="cluster.db was missing")
        stored = self.storage.history()
        if has_next_key(self.directory, stored.log if stored is not None else None):
            use_next_key(self.directory)
            self.key = NodeKey.load_or_create(self.directory / "node.key")
            self.me = self.key.id
        saved_name = self.storage.fact(_NAME_FACT)
        self.name = saved_name.decode() if saved_name is not None else machine_name()
        is_new = stored is None
        if stored is None:
            log = TrustLog.found(self.key, self.name)
            stored = StoredHistory(founded(first(self.me.raw, self.incarnation, len(log))), log)
        self.peer_store = PeerStore(self.storage)
        self.build_member(stored)
        tls = AgentTls(delegate(self.key, run=AGENT_RUN, worker=self.incarnation), lambda: self.log.members)
        self.connections = AgentConnections(self.me, tls, self)
        self.reachability = ReachabilityProber(
            tls,
            self._address_of,
            self.secret_for,
            self.connections.get,
            lambda node: self.log.role(node) == "owner",
        )
        self.pairing = PairingServer(self.key, lambda: self.name, partial(admit, self))
        self.pairing.on_burned = lambda address, why: self.audit.write("code-burned", by=address, detail=why)
        self.link_prober = LinkProber(self, self.directory)
        self.kv = KvService(self)
        self.runs = RunService(self)
        self.queue = QueueService(self, self.runs)
        self.notifications = NotificationService(self, self.runs.registry)
        self.runs.on_record = self.notifications.on_record
        self.limits = LimitsService(self, lambda: bool(self.runs.executors), self._limits_changed)
        self.remote_pause = RemotePause(self, self.runs.pause_effects)
        self.cleaner = Cleaner(self, self.runs)
        self.metrics = MetricsService(self)
        self.page = PageService(self)
        await self.listener.start()
        self.journals = await self._load_journals()
        if is_new:
            self.storage.replace_cluster(stored.record, tuple(map(encode_entry, stored.log.entries)))
        self.kv.view_changed()
        self.journals.view_changed()
        self.discovery = PeerDiscovery(self)
        await self.discovery.start()
        self.spawn(self._tick())
        self.notifications.load()
        self.runs.load()
        self.queue.load()
        jobs = (*self.link_prober.jobs(), *self.runs.jobs(), *self.queue.jobs(), self.metrics.run)
        jobs += self.notifications.jobs()
        for job in (*jobs, self.kv.run, self.journals.run, self.limits.run, self.cleaner.watch_disk):
            self.spawn(job())
        self.spawn(watch_sleep(self.suspend, self.resume))
        self.audit.write(
            "agent-started",
            subject=f"{self.name} ({self.me.short})",
            detail=f"version {__version__}, cluster {self.cluster_name}",
        )
        self.report_event(f"{self.name} ({self.me.short}) is up in cluster {self.cluster_name}")

    async def _load_journals(self) -> KvService:
        """Load the journals, once no agent that is just stopping can write them any more."""
        try:
            self._journal_storage = JournalStorage(self.directory)
            return KvService(self, self._journal_storage)
        except BaseException:
            await self.listener.stop()
            raise

    async def stop(self) -> None:
        """Leave running groups, send goodbye and stop all services, within a few seconds."""
        others = [node for node in self.member.view.nodes if node != self.me.raw]
        has_peers = others and self.connections.linked() and not self._broken
        if has_peers:
            await self.runs.leave()
        await self.page.stop()
        await self.notifications.stop()
        await self.runs.stop()
        if has_peers:
            await self._send_goodbye()
            await asyncio.sleep(_HANDOVER_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.pairing.close()
        await self.reachability.close()
        await self.connections.close("the agent stops")
        await self.discovery.stop()
        await self.journals.stop()  # before the listener lets another agent start in this directory
        self._journal_storage.close()
        await self.listener.stop()
        self.peer_store.flush(float("inf"))
        self.storage.close()

    async def suspend(self) -> None:
        """Leave running groups and send goodbye before the system sleeps."""
        self.report_event("this machine is going to sleep")
        await self.runs.leave()
        await self._send_goodbye()

    async def _send_goodbye(self) -> None:
        self._perform(self.member.leave(self._loop.time()))
        deadline = self._loop.time() + _GOODBYE_S
        while self.member.is_member and self.connections.linked() and self._loop.time() < deadline:
            await self.wait_for_change(deadline - self._loop.time())

    async def resume(self) -> None:
        """Join the cluster again after the system slept."""
        self.report_event("this machine is awake again")
        self._perform(self.member.cancel_leave(self._loop.time()))
        self.runs.rejoin()

    @property
    def log(self) -> TrustLog:
        """Return the trust log of the cluster."""
        return self.member.log

    @property
    def cluster_name(self) -> str:
        """Return the short name of the cluster."""
        return self.log.cluster.hex()[:8]

    def name_of(self, node: NodeId) -> str:
        """Return the name of a machine; a part of the id is appended if an older machine has the name."""
        return shown_name(node, self._own_name(node), self.named_machines())

    def named_machines(self) -> list[NamedMachine]:
        """Return the machines of the cluster with the names they give themselves, in order of admission."""
        return [
            NamedMachine(node, self._own_name(node), member.role == "owner")
            for node, member in self.log.members.items()
        ]

    def _own_name(self, node: NodeId) -> str:
        if node == self.me:
            return self.name
        listed = self.log.members.get(node) or self.log.revoked.get(node)
        return self.peer_store[node].name or (listed.name if listed is not None else node.short)

    def find(self, text: str, *, exact: bool = False) -> NodeId:
        """Return the machine with this name or id, or the only one whose name starts with the text.

        ``exact``: the beginning of a name is not enough. Raise MembershipError unless one matches.
        """
        return find_machine(text, self.named_machines(), exact=exact)

    def report_event(self, text: str) -> None:
        """Write one line to the log, the display and `barnraise status`."""
        text = printable(text)  # it may quote another machine
        _log.info("%s", text)
        self.events.append(text)
        if self.on_event is not None:
            self.on_event(text)

    def rename(self, name: str) -> None:
        """Change the name of this machine; raise MembershipError if another machine has it."""
        check_name_is_free(name, self.named_machines(), self.me)
        self.audit.write("identity-changed", subject=self.me.short, detail=f"renamed {self.name} to {name}")
        self.name = name
        self.storage.keep_fact(_NAME_FACT, name.encode())
        self._send_hello()

    async def commit_entry(
        self, make: Callable[[TrustLog], SignedEntry | None], patience_s: float = 30.0
    ) -> None:
        """Append an entry to the trust log; sign it again if another entry came first.

        ``make`` returns the signed entry for the current log, or None if the log has it already. Raise
        MembershipError if the cluster does not decide in time.
        """
        deadline = self._loop.time() + patience_s
        while (entry := make(self.log)) is not None:
            if self._loop.time() > deadline:
                reason = self.blocked_reason() or "other changes came first"
                raise MembershipError(f"the cluster did not decide in {patience_s:g} s: {reason}")
            if self.log.role(self.me) != "owner":
                raise MembershipError(
                    "guests cannot change the cluster",
                    hint="Do it on a machine that `barnraise nodes` shows as owner.",
                )
            length = len(self.log)
            self._perform(self.member.propose_entry(encode_entry(entry), self._loop.time()))
            retry_at = min(deadline, self._loop.time() + _AGAIN_S)
            while len(self.log) == length and self._loop.time() < retry_at:
                await self.wait_for_change(retry_at - self._loop.time())

    def continue_without(self, nodes: list[NodeId]) -> None:
        """Let the cluster decide without these machines."""
        self._perform(self.member.continue_without([node.raw for node in nodes], self._loop.time()))

    def blocked_reason(self) -> str:
        """Return why the cluster cannot decide now; empty if it can."""
        if self.removed_by:
            return f"{self.removed_by} reports that this machine was removed: run `barnraise leave`"
        standing = self.member.quorum_status(self._loop.time())
        if standing.decides:
            return ""
        if not standing.needed:
            return "this machine is still joining the cluster"
        names = [self.name_of(NodeId(raw)) for raw in standing.needed]
        choice = "one of " if len(names) > 1 else ""
        return f"waiting for {choice}{', '.join(names)}: there is no majority without it"

    # ListenerHost
    def trusted_for(self, run: str) -> tuple[NodeId, ...]:
        """Return the machines that workers of this run trust."""
        entry = self.runs.registry.runs.get(run)
        return trusted_nodes(self.log, self.me, entry.spec if entry is not None else None)

    def pairing_key(self, target: bytes) -> bytes | None:
        """Return the preface key of an open offer, or None."""
        return self.pairing.key_for(target)

    def deliver_pairing(
        self, preface: Preface, connection: socket.socket, address: str
    ) -> ConnectionRefusal | None:
        """Start to pair with a machine, or return why it is refused."""
        return self.pairing.deliver(preface, connection, address)

    def deliver_agent(self, preface: Preface, connection: socket.socket, address: str) -> None:
        """Accept a connection of another agent."""
        self.connections.accept(connection, preface, address)

    async def answer(self, request: bytes, run: str) -> bytes:
        """Answer a request of a process on this machine; ``run`` limits what a worker may ask."""
        if self.on_request is None:
            raise AgentError("the agent is still starting", hint="Ask again in a moment.")
        return await self.on_request(request, run)

    # what the links tell (see agent.connections)

    def link_up(self, node: NodeId, link: ControlConnection) -> None:
        """Send hello and measurements to a machine whose first control connection is up."""
        link.send(self._hello())
        self.link_prober.send_measured(node)
        self.discovery.remember()
        self.queue.link_up(node)
        self.runs.link_up(node)
        self._linked_at[node] = self._loop.time()
        self._perform(self.member.link_up(node.raw, self._loop.time()))

    def link_down(self, node: NodeId, why: str) -> None:
        """Dial a machine again whose last control connection is lost."""
        _log.debug("the link to %s is down: %s", self.name_of(node), why)
        metrics.counter(catalogue.AGENT_LINK_LOSSES).inc()
        self.discovery.remember()
        self.runs.link_down(node)
        self.member.link_down(node.raw)
        # At once: a refusal would prove that its agent has stopped. But not in a loop.
        if self._loop.time() - self._linked_at.get(node, 0.0) > _SHORT_LINK_S:
            self.connections.dial(node, at_once=True)

    def route_down(self, node: NodeId, route: int) -> None:
        """Tell the transfer service that its route to a machine is lost."""
        if route == ROUTE_AGENT_SHIP:
            self.runs.artifact_route_down(node)

    def refused(self, node: NodeId) -> None:
        """Tell the failure detector that no agent listens on a machine."""
        self._perform(self.member.connection_refused(node.raw, self._loop.time()))

    def received(self, link: ControlConnection, message: bytes) -> None:
        """Dispatch a message of another agent; raise ProtocolError if it is not of a member."""
        node, kind, body = link.peer.node, message[:1], memoryview(message)[1:]
        if self.log.role(node) is None:
            raise ProtocolError(f"{node.short} is no longer in this cluster")
        if kind == protocol.MEMBERSHIP:
            heard = protocol.decode_membership(body)
            if isinstance(heard, Heartbeat):
                metrics.counter(catalogue.HEARTBEATS, "received").inc()
            self._perform(self.member.receive(node.raw, heard, self._loop.time()))
        elif kind == protocol.GREETING:
            self._on_hello(node, link, protocol.decode_hello(body))
        elif kind == protocol.BOARD:
            self.kv.received(node, body)
        elif kind == protocol.JOURNAL:
            self.journals.received(node, body)
        elif kind in (protocol.RUN, protocol.SHIP, protocol.GUEST_BOARD):
            self.runs.received(node, kind, body)
        elif kind == protocol.QUEUE:
            self.queue.received(node, body)
        elif kind == protocol.PAUSE:
            self.remote_pause.received(node, body)
        elif kind == protocol.OWNER:
            self.page.received(node, body)
        elif kind == protocol.TRAIN:
            self.link_prober.received(node, body)
        elif kind == protocol.SURVEY:
            self.reachability.received(link, body)
        elif kind == protocol.REMOVED and self.log.role(node) == "owner":
            self.removed_by = self.name_of(node)
            if not self.rotates_key:
                self.report_event(
                    f"{self.removed_by} reports that this machine was removed from the cluster: "
                    "run `barnraise leave`"
                )
        else:
            raise ProtocolError(f"{node.short} sent a message of an unknown kind")

    def secret_for(self, node: NodeId | None, epoch: int) -> bytes:
        """Return the cluster secret of an epoch, or the newest known one before it."""
        known = self.log.secrets
        return known[min(epoch, len(known)) - 1]

    # what the surveyor asks (see agent.link_prober)

    def linked_nodes(self) -> list[NodeId]:
        """Return the machines to which there is a control connection."""
        return self.connections.linked()

    def round_trip(self, node: NodeId) -> tuple[float, float] | None:
        """Return the least recent round-trip time and its deviation, in seconds."""
        peer = self.member.peers.get(node.raw)
        if peer is None or not peer.detector.trips or self.connections.get(node) is None:
            return None
        # The minimum: a busy machine adds to the others.
        return min(peer.detector.trips), max(0.0, peer.detector.trip.deviation)

    def link_address(self, node: NodeId) -> str:
        """Return the address that the control connection uses; empty if there is none."""
        link = self.connections.get(node)
        return link.address if link is not None else ""

    def node_facts(self) -> list[NodeFacts]:
        """Return name and hardware of every machine of the cluster."""
        return [
            NodeFacts(node=node.raw.hex(), name=self.name_of(node), machine=self.machine_of(node))
            for node in self.log.members
        ]

    def send_bulk(self, node: NodeId, message: bytes) -> None:
        """Send a message on the bulk route; it is dropped if the machine is not connected."""
        self.connections.send_on(ROUTE_AGENT_BULK, node, message)

    def _limits_changed(self) -> None:
        self.runs.limits_changed()
        self.queue.wake()

    def machine_changed(self) -> None:
        """Send what this machine now says of itself to all connected machines."""
        self._send_hello()

    def sends_notices(self, node: NodeId) -> bool:
        """Tell whether a machine has a target for notices of failures."""
        return self.notifications.takes_failures if node == self.me else self.peer_store[node].notifies

    def machine_of(self, node: NodeId) -> Machine | None:
        """Return the hardware facts of a machine, or None if they are unknown."""
        if node == self.me:
            return self.link_prober.machine
        return decode_machine(self.peer_store[node].machine)

    def _send_hello(self) -> None:
        for node in self.connections.linked():
            self.connections.send(node, self._hello())

    def build_member(self, stored: StoredHistory) -> None:
        """Start a new membership state from this history."""
        # A machine with a new key may not have seen the decision yet; only owners have new keys.
        votes = stored.log.role(self.me) != "guest"
        me = PresentMember(self.me.raw, self.incarnation, votes=votes, works=self._works)
        self.audit_trail.begin(stored.log, stored.record.decided.branch >> BRANCH_BITS)
        now = asyncio.get_running_loop().time()
        self.member = MembershipNode(me, self.key, stored, random.Random(), now)

    def _perform(self, effects: list[Effect]) -> None:
        if self._broken:  # memory is ahead of the disk: nothing may be sent
            return
        for effect in effects:
            match effect:
                case SaveState():
                    try:
                        self.storage.save(effect)
                    except MembershipError as error:
                        self._broken = True
                        self.report_event(f"the agent stops: {error.message}")
                        self.stop_requested.set()
                        return
                case SendMessage():
                    if isinstance(effect.message, Heartbeat):
                        metrics.counter(catalogue.HEARTBEATS, "sent").inc()
                    self.connections.send(NodeId(effect.to), protocol.encode_membership(effect.message))
                case ViewChanged():
                    self._on_view(effect.why)
                case LogNote():
                    self.report_event(effect.text)

    def _on_view(self, why: str) -> None:
        names = ", ".join(self.name_of(NodeId(raw)) for raw in self.member.view.nodes)
        reason = why
        for node in (*self.log.members, *self.log.revoked):
            reason = reason.replace(node.raw.hex()[:8], self.name_of(node))
        self.audit_trail.cluster_changed(self.log, self.member.record.decided.branch >> BRANCH_BITS, reason)
        self.report_event(f"online: {names} ({reason})")
        self._report_name_clashes()
        for node in self.connections.linked():
            if node not in self.log.members:
                self.connections.send(node, protocol.REMOVED)
                self.connections.disconnect(node, "it was removed from the cluster")
        self.listener.refresh_trust()
        self.peer_store.keep_only(set(self.log.members))
        self.discovery.update_tags()
        self.discovery.dial_all()
        if len(self.log.secrets) != self._epoch:
            self._epoch = len(self.log.secrets)
            self._send_hello()
        self.kv.view_changed()
        self.journals.view_changed()
        self.runs.view_changed()
        self.queue.view_changed()
        self._view_event.announce()

    async def wait_for_change(self, seconds: float) -> None:
        """Wait for a change of the membership view, at most ``seconds``."""
        await self._view_event.wait(seconds)

    async def _tick(self) -> None:
        while True:
            self._perform(self.member.tick(self._loop.time()))
            self.discovery.update_tags()
            self.listener.refresh_trust()
            self.peer_store.flush(self._loop.time())
            await asyncio.sleep(TICK_S)

    def _hello(self) -> bytes:
        hello = protocol.PeerHello(
            name=self.name,
            version=__version__,
            addresses=tuple(self.own_addresses()[:8]),
            port=self.listener.port,
            epoch=len(self.log.secrets),
            machine=msgspec.msgpack.encode(self.link_prober.machine),
            paused=self.limits.shown_reason,
            notifies=self.notifications.takes_failures,
        )
        return protocol.encode_hello(hello)

    def _on_hello(self, node: NodeId, link: ControlConnection, hello: protocol.PeerHello) -> None:
        check_name(hello.name)
        if not is_printable(hello.version) or not is_printable(hello.paused):
            raise ProtocolError(f"{node.short} sent a hello with unprintable characters")
        self.peer_store.apply_hello(node, hello, link.address)
        self._report_name_clashes()
        place = self.peer_store.address_of(node)
        if place is not None:
            self.connections.learn(node, place)
        self.queue.wake()

    def _report_name_clashes(self) -> None:
        clashes = name_clashes(self.named_machines(), self.me)
        for text in clashes:
            if text not in self._name_clashes:
                self.report_event(text.replace("\n", " "))
        self._name_clashes = clashes

    def _address_of(self, node: NodeId) -> PeerAddress | None:
        return self.connections.address_of(node) or self.peer_store.address_of(node)

    def own_addresses(self) -> list[str]:
        """Return the addresses at which this machine can be dialled."""
        return list(self.settings.network.addresses) or machine_addresses()

    def spawn(self, work: Coroutine[object, object, None] | Awaitable[None]) -> None:
        """Run work in the background; the agent stops if it fails."""
        task = asyncio.ensure_future(work, loop=self._loop)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a background task of the agent failed", exc_info=task.exception())
            self.stop_requested.set()


def machine_name() -> str:
    """Return the first part of the host name, as the name of a machine that has no other yet."""
    name = printable(socket.gethostname().split(".")[0], instead="").strip()
    return name[:NAME_LENGTH].strip() or "machine"
