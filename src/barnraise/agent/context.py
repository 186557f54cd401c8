"""The part of an agent that its services use."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from barnraise.agent.audit_trail import AuditTrail
from barnraise.core.config import Settings
from barnraise.core.logs.audit_log import AuditLog
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.membership.node import MembershipNode
from barnraise.membership.storage import MembershipStorage
from barnraise.topology import Machine, NodeFacts
from barnraise.transport.listener.listener import Listener

if TYPE_CHECKING:
    from barnraise.agent.cluster.connections import AgentConnections
    from barnraise.agent.cluster.kv_service import KvService
    from barnraise.agent.cluster.pairing_server import PairingServer
    from barnraise.agent.cluster.peer_store import PeerStore
    from barnraise.agent.limits.service import LimitsService
    from barnraise.agent.metrics.service import MetricsService


class AgentContext(Protocol):
    """Shared state and calls of one agent, given to each of its services."""

    me: NodeId
    key: NodeKey
    incarnation: bytes
    settings: Settings
    directory: Path
    storage: MembershipStorage
    audit: AuditLog
    audit_trail: AuditTrail
    member: MembershipNode
    listener: Listener
    connections: AgentConnections
    peer_store: PeerStore
    pairing: PairingServer
    kv: KvService
    journals: KvService
    limits: LimitsService
    metrics: MetricsService

    @property
    def log(self) -> TrustLog:
        """Return the trust log of the cluster."""

    def name_of(self, node: NodeId) -> str:
        """Return the name that people know a machine by."""

    def machine_of(self, node: NodeId) -> Machine | None:
        """Return the hardware facts of a machine, or None if they are unknown."""

    def node_facts(self) -> list[NodeFacts]:
        """Return name and hardware of every machine of the cluster."""

    def own_addresses(self) -> list[str]:
        """Return the addresses at which this machine can be dialled."""

    def linked_nodes(self) -> list[NodeId]:
        """Return the machines to which there is a control connection."""

    def link_address(self, node: NodeId) -> str:
        """Return the address that the control connection uses; empty if there is none."""

    def round_trip(self, node: NodeId) -> tuple[float, float] | None:
        """Return the round-trip time of heartbeats and its deviation, in seconds."""

    def secret_for(self, node: NodeId | None, epoch: int) -> bytes:
        """Return the cluster secret of an epoch, or the newest known one before it."""

    def send_bulk(self, node: NodeId, message: bytes) -> None:
        """Send a message on the bulk route; it is dropped if the machine is not connected."""

    def machine_changed(self) -> None:
        """Send what this machine now says of itself to all connected machines."""

    def sends_notices(self, node: NodeId) -> bool:
        """Tell whether a machine has a target for notices of failures."""

    def report_event(self, text: str) -> None:
        """Write one line to the log, the display and `barnraise status`."""

    def spawn(self, work: Coroutine[object, object, None] | Awaitable[None]) -> None:
        """Run work in the background until the agent stops."""


class AnsweringContext(AgentContext, Protocol):
    """Agent whose service passes requests on to its local interface."""

    async def answer(self, request: bytes, run: str) -> bytes:
        """Answer a request of a process on this machine."""

    def find(self, text: str, *, exact: bool = False) -> NodeId:
        """Return the machine with this name or id; raise MembershipError unless one matches."""
