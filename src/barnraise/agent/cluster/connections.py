"""Control connections to the other agents: dials every machine, accepts calls, keeps one connection per pair.

Two machines may dial each other at the same moment. The connection that the smaller node id dialled is kept.
Only the side that dialled closes a redundant connection, so that the two never close each other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from typing import NamedTuple, Protocol

from barnraise.core.errors import BarnraiseError, HandshakeError
from barnraise.identity import NodeId
from barnraise.transport.address_race import AddressChoice, dial_best
from barnraise.transport.control.dial import (
    AgentTls,
    ControlConnection,
    DialOptions,
    accept_agent,
    was_refused,
)
from barnraise.transport.listener.preface import (
    AGENT_ROUTES,
    ANY_AGENT,
    ROUTE_AGENT,
    Preface,
    target_at,
    target_of,
)
from barnraise.transport.log_throttle import ThrottledLog

_OTHER_FIRST_S = 0.4  # how long the larger node id waits for the smaller one's call
_MAX_QUEUED = 1024  # records and reports of all runs, when a machine is back
_MAX_LINKS = 3  # to one node on one route
_NEWEST = 1 << 30

_log = logging.getLogger(__name__)


class PeerAddress(NamedTuple):
    """Addresses and port of a node; ``epoch``: how many cluster secrets it knew last."""

    addresses: tuple[str, ...]
    port: int
    epoch: int = 1


class ConnectionHost(Protocol):
    """Callbacks of the connections into the agent."""

    def link_up(self, node: NodeId, link: ControlConnection) -> None:
        """Handle the first control connection to a node."""

    def link_down(self, node: NodeId, why: str) -> None:
        """Handle the loss of the last control connection to a node."""

    def route_down(self, node: NodeId, route: int) -> None:
        """Handle the loss of the last connection of another route."""

    def refused(self, node: NodeId) -> None:
        """Handle a refused dial: the machine is on, but no agent listens."""

    def received(self, link: ControlConnection, message: bytes) -> None:
        """Handle a message of a node."""

    def secret_for(self, node: NodeId | None, epoch: int) -> bytes:
        """Return the cluster secret of an epoch."""


class _PeerConnection:
    """Addresses, connections and queued messages of one node."""

    def __init__(self) -> None:
        self.links: dict[int, list[ControlConnection]] = {route: [] for route in AGENT_ROUTES}
        self.address: PeerAddress | None = None
        self.choice: AddressChoice | None = None
        self.dialling: dict[int, asyncio.Task[None]] = {}
        self.queued: dict[int, list[bytes]] = {route: [] for route in AGENT_ROUTES}
        self.failure = ""

    def all_links(self) -> list[ControlConnection]:
        """Return the connections of all routes."""
        return [link for links in self.links.values() for link in links]


class AgentConnections:
    """All connections to other agents, by node and route."""

    def __init__(self, me: NodeId, tls: AgentTls, host: ConnectionHost) -> None:
        self._me = me
        self._tls = tls
        self._host = host
        self._peers: dict[NodeId, _PeerConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._refusals = ThrottledLog(_log, "refused a connection from")

    def get(self, node: NodeId, route: int = ROUTE_AGENT) -> ControlConnection | None:
        """Return the connection to use, or None: the newest that the smaller node id dialled."""
        peer = self._peers.get(node)
        live = [link for link in peer.links[route] if link.closed is None] if peer is not None else []
        if not live:
            return None
        # The newest: an older one may be dead without notice.
        return next((link for link in reversed(live) if self._is_preferred(node, link)), live[-1])

    def linked(self) -> list[NodeId]:
        """Return the nodes with a control connection."""
        return [node for node in self._peers if self.get(node) is not None]

    def choice(self, node: NodeId) -> AddressChoice | None:
        """Return the address that was chosen for a node, and why."""
        peer = self._peers.get(node)
        return peer.choice if peer is not None else None

    def failure(self, node: NodeId) -> str:
        """Return why the last dial failed; empty if it did not."""
        peer = self._peers.get(node)
        return peer.failure if peer is not None else ""

    def address_of(self, node: NodeId) -> PeerAddress | None:
        """Return the known addresses of a node, or None."""
        peer = self._peers.get(node)
        return peer.address if peer is not None else None

    def proved_places(self, node: NodeId) -> frozenset[tuple[str, int]]:
        """Return where this node has proved its key: addresses of its connections, with its port.

        What a machine only says of its addresses is not among them: it might lead others into their own
        networks.
        """
        peer = self._peers.get(node)
        if peer is None or peer.address is None:
            return frozenset()
        addresses = {link.address for link in peer.all_links() if link.closed is None}
        if peer.choice is not None:
            addresses.add(peer.choice.address)
        return frozenset((address.removeprefix("::ffff:"), peer.address.port) for address in addresses)

    def learn(self, node: NodeId, address: PeerAddress) -> None:
        """Add addresses of a node before the ones that are known."""
        peer = self._peer(node)
        old = peer.address.addresses if peer.address is not None and peer.address.port == address.port else ()
        addresses = tuple(dict.fromkeys((*address.addresses, *old)))[:8]
        peer.address = PeerAddress(addresses, address.port, address.epoch)

    def send(self, node: NodeId, message: bytes) -> None:
        """Send on the route of heartbeats; drop the message if there is no connection."""
        link = self.get(node)
        if link is not None:
            link.send(message)

    def send_on(self, route: int, node: NodeId, message: bytes) -> None:
        """Send on another route; its connection is made at the first message."""
        link = self.get(node, route)
        if link is not None:
            link.send(message)
            return
        queued = self._peer(node).queued[route]
        if len(queued) < _MAX_QUEUED and self.get(node) is not None:
            queued.append(message)
            self.dial(node, route)

    def dial(self, node: NodeId, route: int = ROUTE_AGENT, *, at_once: bool = False) -> None:
        """Dial a node unless it is connected or being dialled."""
        peer = self._peer(node)
        if (
            self._closing
            or peer.address is None
            or route in peer.dialling
            or self.get(node, route) is not None
        ):
            return
        wait = 0.0 if at_once or self._me < node or route != ROUTE_AGENT else _OTHER_FIRST_S
        task = self._spawn(self._dial(node, peer, route, wait))
        peer.dialling[route] = task
        task.add_done_callback(lambda _: peer.dialling.pop(route, None))

    async def dial_unknown(self, address: str, port: int, secret: bytes, *, named: bool) -> NodeId:
        """Dial an address and return the node there; raise BarnraiseError if it is not of this cluster.

        ``named``: a person gave the address. It may be a router's address that the machine itself does not
        know. Only then the preface is not bound to the address.
        """
        target = ANY_AGENT if named else target_at(secret, address, port)
        options = DialOptions(ROUTE_AGENT, target, secret, self._tls, expect=None)
        link, choice = await dial_best(
            [address], port, options, on_message=self._host.received, on_closed=self._closed
        )
        node = link.peer.node
        self.learn(node, PeerAddress((choice.address,), port, self._epoch(node)))
        self._register(node, link, choice)
        return node

    def accept(self, connection: socket.socket, preface: Preface, address: str) -> None:
        """Accept a connection whose preface was valid."""
        if self._closing:
            connection.close()
            return
        self._spawn(self._accept(connection, preface, address))

    def disconnect(self, node: NodeId, why: str) -> None:
        """Close all connections to a node and forget its addresses."""
        peer = self._peers.pop(node, None)
        if peer is None:
            return
        for task in peer.dialling.values():
            task.cancel()
        for link in peer.all_links():
            link.close(why, flush=True)

    async def close(self, why: str) -> None:
        """Close all connections and stop all dials."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        for peer in self._peers.values():
            for link in peer.all_links():
                link.close(why, flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def forget_all(self, why: str) -> None:
        """Close the connections to all nodes of the old cluster."""
        for node in list(self._peers):
            self.disconnect(node, why)

    async def _dial(self, node: NodeId, peer: _PeerConnection, route: int, wait: float) -> None:
        if wait:
            await asyncio.sleep(wait)
        address = peer.address
        if address is None or self.get(node, route) is not None:
            return
        current = self.get(node)
        addresses = (current.address,) if current is not None and current.outbound else address.addresses
        try:
            try:
                link, choice = await self._call(node, peer, route, addresses, address.epoch)
            except HandshakeError:
                # It may have learnt a newer secret from others meanwhile.
                link, choice = await self._call(node, peer, route, addresses, _NEWEST)
        except BarnraiseError as error:
            peer.failure = error.message
            _log.debug("cannot dial %s: %s", node.short, error.message)
            if route == ROUTE_AGENT and was_refused(error) and self.get(node) is None:
                self._host.refused(node)
            return
        self._register(node, link, choice)

    async def _call(
        self, node: NodeId, peer: _PeerConnection, route: int, addresses: tuple[str, ...], epoch: int
    ) -> tuple[ControlConnection, AddressChoice]:
        assert peer.address is not None
        return await dial_best(
            addresses,
            peer.address.port,
            DialOptions(route, target_of(node), self._host.secret_for(node, epoch), self._tls, expect=node),
            on_message=self._host.received,
            on_closed=self._closed,
            current=peer.choice.address if peer.choice is not None else None,
        )

    async def _accept(self, connection: socket.socket, preface: Preface, address: str) -> None:
        try:
            link = await accept_agent(
                connection,
                preface,
                address,
                tls=self._tls,
                on_message=self._host.received,
                on_closed=self._closed,
            )
        except HandshakeError as error:
            self._refusals.about(address, error.message)
            return
        except BarnraiseError as error:
            _log.debug("a connection from %s failed: %s", address, error.message)
            return
        self._register(link.peer.node, link, None)

    def _register(self, node: NodeId, link: ControlConnection, choice: AddressChoice | None) -> None:
        """Keep a new connection unless there is a better one.

        A new incarnation of a node closes the connections of the old one.
        """
        if node == self._me or self._closing:
            link.close("it has this machine's own node key" if node == self._me else "the agent stops")
            return
        peer = self._peer(node)
        peer.failure = ""
        rivals = [other for other in peer.links[link.route] if other.closed is None]
        for other in rivals:
            if other.peer.worker != link.peer.worker:
                other.close("replaced by a later incarnation of its agent")
        rivals = [other for other in rivals if other.closed is None]
        if link.outbound and any(other.outbound or not self._is_preferred(node, link) for other in rivals):
            link.close("there is a connection already", flush=True)
            return
        peer.links[link.route].append(link)
        for oldest in peer.links[link.route][:-_MAX_LINKS]:
            oldest.close("there are newer connections")
        if choice is not None and link.route == ROUTE_AGENT:
            peer.choice = choice
        for other in rivals:
            if other.outbound and not self._is_preferred(node, other):
                other.close("the other side's connection is used", flush=True)
        if link.route != ROUTE_AGENT:
            queued, peer.queued[link.route] = peer.queued[link.route], []
            for message in queued:
                link.send(message)
        elif not rivals:
            self._host.link_up(node, link)

    def _closed(self, link: ControlConnection, why: str) -> None:
        node = link.peer.node
        peer = self._peers.get(node)
        if peer is None or link not in peer.links[link.route]:
            return
        peer.links[link.route].remove(link)
        if self.get(node, link.route) is not None:
            return
        if link.route == ROUTE_AGENT:
            self._host.link_down(node, why)
        else:
            self._host.route_down(node, link.route)

    def _is_preferred(self, node: NodeId, link: ControlConnection) -> bool:
        return link.outbound == (self._me < node)

    def _epoch(self, node: NodeId) -> int:
        address = self.address_of(node)
        return address.epoch if address is not None else 1

    def _peer(self, node: NodeId) -> _PeerConnection:
        peer = self._peers.get(node)
        if peer is None:
            peer = self._peers[node] = _PeerConnection()
        return peer

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _logged(work: Coroutine[object, object, None]) -> None:
    try:
        await work
    except Exception:  # noqa: BLE001  # one failure must not stop the others
        _log.exception("a connection could not be handled")
