"""The agent as the house behind its listener: trust, secrets and routes as the cluster has them now."""

from __future__ import annotations

import socket
from typing import Protocol

from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.transport.listener.acceptor import ConnectionRefusal
from barnraise.transport.listener.preface import (
    AGENT_ROUTES,
    ANYBODY,
    ROUTE_PAIRING,
    Preface,
    refuse_route,
    target_at,
    target_of,
)


class ListenerHost(Protocol):
    """What the house needs of the agent."""

    key: NodeKey

    @property
    def log(self) -> TrustLog: ...

    def pairing_key(self, target: bytes) -> bytes | None: ...

    def deliver_pairing(
        self, preface: Preface, connection: socket.socket, address: str
    ) -> ConnectionRefusal | None: ...

    def deliver_agent(self, preface: Preface, connection: socket.socket, address: str) -> None: ...

    async def answer(self, question: bytes) -> bytes: ...


class ClusterConnectionPolicy:
    """Asks the agent anew for everything: trust changes while it runs."""

    def __init__(self, agent: ListenerHost) -> None:
        self._agent = agent

    @property
    def key(self) -> NodeKey:
        return self._agent.key

    def trusted(self) -> tuple[NodeId, ...]:
        return tuple(self._agent.log.members)

    def secret(self) -> bytes:
        return self._agent.log.secret

    def key_for(self, route: int, target: bytes) -> bytes | None:
        if route == ROUTE_PAIRING:
            return self._agent.pairing_key(target)
        return self._agent.log.secret

    def deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        if preface.route == ROUTE_PAIRING:
            return self._agent.deliver_pairing(preface, connection, address)
        if preface.route in AGENT_ROUTES:
            own, port = connection.getsockname()[:2]
            here = target_at(self.secret(), own.removeprefix("::ffff:"), port)
            if preface.target not in (ANYBODY, target_of(self.key.id), here):
                # Not a word: it may be somebody's preface for another place, shown by a stranger.
                return ConnectionRefusal("it looks for another machine")
            self._agent.deliver_agent(preface, connection, address)
            return None
        return ConnectionRefusal(f"route {preface.route} does not exist here", refuse_route())

    async def answer(self, question: bytes) -> bytes:
        return await self._agent.answer(question)

    def refuse_run(self, run: str) -> str | None:
        return None
