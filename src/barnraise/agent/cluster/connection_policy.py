"""The listener's connection policy: keys, trust and routes as the cluster has them now."""

from __future__ import annotations

import socket
from typing import Protocol

from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.transport.listener.acceptor import ConnectionRefusal
from barnraise.transport.listener.preface import (
    AGENT_ROUTES,
    ANY_AGENT,
    ROUTE_PAIRING,
    Preface,
    refuse_route,
    target_at,
    target_of,
)


class ListenerHost(Protocol):
    """Callbacks of the connection policy into the agent."""

    key: NodeKey

    @property
    def log(self) -> TrustLog:
        """Return the trust log of the cluster."""

    def trusted_for(self, run: str) -> tuple[NodeId, ...]:
        """Return the machines that workers of this run trust."""

    def pairing_key(self, target: bytes) -> bytes | None:
        """Return the preface key of an open offer, or None."""

    def deliver_pairing(
        self, preface: Preface, connection: socket.socket, address: str
    ) -> ConnectionRefusal | None:
        """Start to pair with a machine, or return why it is refused."""

    def deliver_agent(self, preface: Preface, connection: socket.socket, address: str) -> None:
        """Accept a connection of another agent."""

    async def answer(self, request: bytes, run: str) -> bytes:
        """Answer a request of a process on this machine; ``run`` limits what a worker may ask."""


class ClusterConnectionPolicy:
    """Connection policy that asks the agent each time, because trust changes while it runs."""

    def __init__(self, agent: ListenerHost) -> None:
        self._agent = agent

    @property
    def key(self) -> NodeKey:
        """Return the node key of this machine."""
        return self._agent.key

    def trusted(self, run: str) -> tuple[NodeId, ...]:
        """Return the machines that workers of this run trust."""
        return self._agent.trusted_for(run)

    def secret(self) -> bytes:
        """Return the newest secret of the cluster."""
        return self._agent.log.secret

    def key_for(self, route: int, target: bytes) -> bytes | None:
        """Return the preface key of a route, or None if the route is closed."""
        if route == ROUTE_PAIRING:
            return self._agent.pairing_key(target)
        return self._agent.log.secret

    def deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        """Pass a connection to its service, or return why it is refused."""
        if preface.route == ROUTE_PAIRING:
            return self._agent.deliver_pairing(preface, connection, address)
        if preface.route in AGENT_ROUTES:
            own, port = connection.getsockname()[:2]
            here = target_at(self.secret(), own.removeprefix("::ffff:"), port)
            if preface.target not in (ANY_AGENT, target_of(self.key.id), here):
                # No response: a stranger may have replayed a preface for another machine.
                return ConnectionRefusal("it looks for another machine")
            self._agent.deliver_agent(preface, connection, address)
            return None
        return ConnectionRefusal(f"route {preface.route} does not exist here", refuse_route())

    async def answer(self, question: bytes, run: str) -> bytes:
        """Answer a request of a process on this machine."""
        return await self._agent.answer(question, run)

    def refuse_run(self, run: str) -> str | None:
        """Return None: an agent refuses no run at this point."""
        return None
