"""What a listener must know of the machine that it serves, apart from how it listens.

A listener asks its house anew for every preface and every ticket, because trust and secrets change while
it runs. The agent brings a house of its own; without an agent the settings say everything.
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
    """All methods are called on the listener's loop and, but for ``answer``, must return at once."""

    @property
    def key(self) -> NodeKey:
        """Signs what workers of this machine prove themselves with."""

    def trusted(self) -> tuple[NodeId, ...]:
        """Whose workers may reach ours, this node included."""

    def secret(self) -> bytes:
        """The discovery secret, for tickets and the workers' route."""

    def key_for(self, route: int, target: bytes) -> bytes | None:
        """The secret that a preface for this route and target must know; None closes it without a word.

        Strangers choose both, so no preface is authentic yet when this is asked.
        """

    def deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        """Take a connection of another route than the workers'; its preface is checked, not answered.

        None: the house owns ``connection`` (not blocking, untouched by any loop) from now on and closes it.
        A refusal or an exception: the listener closes it, after the refusal's last words.
        """

    async def answer(self, question: bytes) -> bytes:
        """A question of a local process of the same user; a BarnraiseError becomes its refusal.

        It is cancelled when the one who asked leaves.
        """

    def refuse_run(self, run: str) -> str | None:
        """Why no worker of this run may register here; None if it may."""


class SettingsConnectionPolicy:
    """A machine without an agent: trust comes from the settings, the secret from a file."""

    def __init__(self, settings: Settings) -> None:
        directory = private_directory(state_directory(settings))
        self._key = NodeKey.load_or_create(directory / "node.key")
        self._trusted = _trusted_nodes(settings, self._key.id)
        self._secret = _discovery_secret(settings, directory)

    @property
    def key(self) -> NodeKey:
        return self._key

    def trusted(self) -> tuple[NodeId, ...]:
        return self._trusted

    def secret(self) -> bytes:
        return self._secret

    def key_for(self, route: int, target: bytes) -> bytes | None:
        return self._secret if route == ROUTE_WORKER else None

    def deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        return ConnectionRefusal(f"route {preface.route} does not exist here", refuse_route())

    async def answer(self, question: bytes) -> bytes:
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
