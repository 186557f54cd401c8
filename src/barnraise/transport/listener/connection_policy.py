"""Connection policy: what a listener must know of trust, secrets and routes.

A listener asks the policy again for every preface and every ticket, because trust and secrets change while it
runs. The agent has a policy of its own; without an agent the settings are the policy.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Protocol

from barnraise.core.config import Settings, state_directory
from barnraise.core.errors import AgentError, IdentityError
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.private_file import private_directory
from barnraise.identity.secret import load_or_create_secret, load_secret
from barnraise.transport.listener.acceptor import ConnectionRefusal
from barnraise.transport.listener.preface import ROUTE_WORKER, Preface, refuse_route

RESERVED = "@"  # names of runs that begin so are agents', never a worker's


class ConnectionPolicy(Protocol):
    """Interface of a policy.

    All methods run on the listener's loop and, except ``answer``, return at once.
    """

    @property
    def key(self) -> NodeKey:
        """Return the key that signs the credentials of this machine's workers."""

    def trusted(self, run: str) -> tuple[NodeId, ...]:
        """Return the nodes whose workers may be in a group with our workers of this run, with this node."""

    def secret(self) -> bytes:
        """Return the discovery secret, for tickets and the route of workers."""

    def key_for(self, route: int, target: bytes) -> bytes | None:
        """Return the secret of a preface for this route and target; None closes it without an answer.

        Unknown peers choose both, and no preface is authentic yet at this point.
        """

    def deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        """Take a connection of another route than the workers'; its preface is checked, not answered.

        Return None to own ``connection`` (non-blocking, not in any loop) from now on. After a refusal or an
        exception, the listener sends the refusal and closes it.
        """

    async def answer(self, question: bytes, run: str) -> bytes:
        """Answer a request of a local process of the same user; a BarnraiseError becomes a rejection.

        ``run``: the run whose local interface received it; empty for the interface of the person. The call is
        cancelled when the process disconnects.
        """

    def refuse_run(self, run: str) -> str | None:
        """Return the reason why workers of this run may not register here, or None."""


class SettingsConnectionPolicy:
    """Policy of a machine without an agent: trust from the settings, the secret from a file."""

    def __init__(self, settings: Settings) -> None:
        directory = private_directory(state_directory(settings))
        self._key = NodeKey.load_or_create(directory / "node.key")
        self._trusted = _trusted_nodes(settings, self._key.id)
        self._secret = _discovery_secret(settings, directory)

    @property
    def key(self) -> NodeKey:
        return self._key

    def trusted(self, run: str) -> tuple[NodeId, ...]:
        return self._trusted

    def secret(self) -> bytes:
        return self._secret

    def key_for(self, route: int, target: bytes) -> bytes | None:
        return self._secret if route == ROUTE_WORKER else None

    def deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        return ConnectionRefusal(f"route {preface.route} does not exist here", refuse_route())

    async def answer(self, question: bytes, run: str) -> bytes:
        raise AgentError("this machine has a listener but no agent", hint="Start the agent: barnraise up")

    def refuse_run(self, run: str) -> str | None:
        return None


def _trusted_nodes(settings: Settings, own: NodeId) -> tuple[NodeId, ...]:
    nodes = {own: None}
    for text in settings.trust.nodes:
        try:
            nodes[NodeId.parse(text)] = None
        except IdentityError as error:
            raise IdentityError(f"trust.nodes has {text!r}: {error.message}") from error
    return tuple(nodes)


def _discovery_secret(settings: Settings, directory: Path) -> bytes:
    if settings.trust.secret_file is not None:
        return load_secret(Path(settings.trust.secret_file))
    return load_or_create_secret(directory / "secret")
