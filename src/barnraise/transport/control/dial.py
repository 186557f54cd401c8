"""Dial and accept of control connections between agents.

A connection opens in three steps. The preface and TLS prove both nodes. The dialler pings to see that it was
accepted. Then it sends OPEN. Only then does the other side use it, so that a dialler may try several
addresses and keep one. Heartbeats and decisions have a route of their own; everything large takes the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from barnraise.core.errors import BarnraiseError, HandshakeError, ProtocolError, TransportError
from barnraise.identity import NodeId
from barnraise.transport.addresses import show_address, source_of
from barnraise.transport.control.agent_tls import AGENT_RUN, AgentTls, HandshakeLimits, TlsSession, explain
from barnraise.transport.control.connection import (
    LIMITS,
    ConnectionOpening,
    ControlConnection,
    OnClosed,
    OnMessage,
)
from barnraise.transport.listener.preface import (
    ANSWER_BYTES,
    ROUTE_AGENT,
    Preface,
    PrefaceAnswer,
    encode,
    encode_answer,
    negotiate,
    parse_answer,
    refuse_version,
)

__all__ = [
    "AGENT_RUN",
    "HANDSHAKE_S",
    "LIMITS",
    "AgentTls",
    "ControlConnection",
    "DialOptions",
    "HandshakeLimits",
    "accept_agent",
    "dial_unopened",
    "was_refused",
]

HANDSHAKE_S = 5.0
_CONNECTION = "a connection"
_LAST_WORDS_S = 0.2
_CHUNK = 16 * 1024
_LONGEST_ADDRESS = 100
_EXPEDITED = 0xB8
# A peer that vanished is noticed by its silence much earlier; this only frees what its links hold.
_DEAD_S = 20
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def was_refused(error: BarnraiseError) -> bool:
    """Return True if the machine answered that nothing listens on the port.

    This is evidence that its agent has ended. A firewall that rejects instead of dropping looks the same.
    """
    return isinstance(error.__cause__, ConnectionRefusedError)


@dataclass(frozen=True)
class DialOptions:
    """Route, target, proof and patience of a dial.

    ``expect``: the node that must answer; None for any trusted node.
    """

    route: int
    target: bytes
    secret: bytes
    tls: AgentTls
    expect: NodeId | None
    timeout_s: float = HANDSHAKE_S


async def dial_unopened(address: str, port: int, options: DialOptions) -> ControlConnection:
    """Return a connection that can only be pinged, until its ``begin`` opens it for the other side.

    Raise TransportError (see `was_refused`) or HandshakeError with the address in its text. Register the
    connection before you await anything else after ``begin``: messages may come on the loop's next turn.
    """
    tls, timeout_s = options.tls, options.timeout_s
    sockaddr, family = _numeric(address, port)
    preface = Preface(options.target, os.urandom(16), options.route)
    step = _Step(show_address(address, port), timeout_s)
    link: ControlConnection | None = None
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        with step.in_words():
            async with asyncio.timeout(timeout_s):
                connection.setblocking(False)
                _tune(connection, options.route)
                await _connect(connection, sockaddr)
                step.waits_for = "an answer to the preface"
                answer = await _send_preface(connection, encode(preface, options.secret))
                step.waits_for = "the end of the TLS handshake"
                session = tls.session(server_side=False)
                await _handshake(connection, session)
                peer = tls.peer(session, options.expect)
                link = ControlConnection(
                    ConnectionOpening(session, preface, answer.version, peer, address, port, True)
                )
                await link.attach(connection)
                step.waits_for = "the first ping"
                await link.ping(timeout_s)
        tls.check(peer.node)
    except BaseException:
        _give_up(connection, link)
        raise
    return link


async def accept_agent(
    connection: socket.socket,
    preface: Preface,
    address: str,
    *,
    tls: AgentTls,
    timeout_s: float = HANDSHAKE_S,
    on_message: OnMessage,
    on_closed: OnClosed,
) -> ControlConnection:
    """Serve a connection whose preface was checked; own ``connection`` from the call on.

    ``address`` is for people. An error means that there is no connection: it was rejected, or the dialler
    chose another address. Register the connection before you await anything else.
    """
    step = _Step(address, timeout_s)
    link: ControlConnection | None = None
    try:
        with step.in_words():
            host, port = connection.getpeername()[:2]
            source = source_of(host)
            if not tls.handshakes.enter(source):
                raise TransportError("too many handshakes are under way")
            try:
                async with asyncio.timeout(timeout_s):
                    _tune(connection, preface.route)
                    version = await _answer_preface(connection, preface)
                    step.waits_for = "the end of the TLS handshake"
                    session = tls.session(server_side=True)
                    await _handshake(connection, session)
                    peer = tls.peer(session)
                    plain = host.removeprefix("::ffff:")
                    link = ControlConnection(
                        ConnectionOpening(session, preface, version, peer, plain, port, False)
                    )
                    await link.attach(connection)
                    step.waits_for = "the opening of the link"
                    await link.opened()
            finally:
                tls.handshakes.leave(source)
        tls.check(peer.node)
        link.begin(on_message, on_closed)
    except BaseException:
        _give_up(connection, link)
        raise
    return link


@dataclass
class _Step:
    """Step of a handshake, for the text of its failure."""

    where: str
    timeout_s: float
    waits_for: str = _CONNECTION

    @contextlib.contextmanager
    def in_words(self) -> Iterator[None]:
        try:
            yield
        except ConnectionRefusedError as error:
            raise TransportError(
                f"{self.where} refuses the connection: no agent listens there",
                hint="Start the agent on that machine: barnraise up",
            ) from error
        except TimeoutError as error:
            waited = f"waited {self.timeout_s:g} s for {self.waits_for}"
            raise TransportError(f"{self.where} does not answer: {waited}") from error
        except ssl.SSLError as error:
            explained = explain(error)
            raise HandshakeError(f"{self.where}: {explained.message}", hint=explained.hint) from error
        except OSError as error:
            happened = "cannot be reached" if self.waits_for == _CONNECTION else "broke off"
            # asyncio puts its own words over the system's.
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise TransportError(f"{self.where} {happened}: {reason}") from error
        except BarnraiseError as error:
            if self.where not in error.message:
                error.message = f"{self.where}: {error.message}"
            raise


def _numeric(address: str, port: int) -> tuple[tuple[object, ...], int]:
    """Return the address if it is numeric.

    Addresses come from other machines, and a name would need a lookup.
    """
    try:
        if len(address) > _LONGEST_ADDRESS:
            raise ValueError("too long")
        entries = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, ValueError) as error:
        shown = address[:_LONGEST_ADDRESS]
        raise TransportError(f"{shown!r} is not an address", hint="Give the machine's IP address.") from error
    family, _, _, _, sockaddr = entries[0]
    return sockaddr, family


async def _connect(connection: socket.socket, sockaddr: tuple[object, ...]) -> None:
    try:
        await asyncio.get_running_loop().sock_connect(connection, sockaddr)
    except TimeoutError as error:  # the system's own; ours arrives as a cancellation
        raise TransportError("the system gave up connecting") from error


async def _send_preface(connection: socket.socket, words: bytes) -> PrefaceAnswer:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, words)
    received = b""
    while len(received) < ANSWER_BYTES:
        try:
            data = await loop.sock_recv(connection, ANSWER_BYTES - len(received))
        except ConnectionResetError:
            data = b""
        if not data:
            raise HandshakeError(
                "it closed the connection without an answer",
                hint="It belongs to another cluster, does not know this machine yet, or was replaced.",
            )
        received += data
    answer = parse_answer(received)
    if answer.refusal is not None:
        raise HandshakeError(answer.refusal, hint="Install the same Barnraise version on both machines.")
    if answer.plaintext or negotiate(answer.version, answer.version) is None:
        raise ProtocolError("it chose a version that was not offered")
    return answer


async def _answer_preface(connection: socket.socket, preface: Preface) -> int:
    """Answer a preface with the version to use."""
    loop = asyncio.get_running_loop()
    version = negotiate(preface.version_min, preface.version_max)
    if version is None:
        await _send_refusal(connection, refuse_version())
        raise HandshakeError("there is no common protocol version")
    if preface.plaintext or preface.route not in LIMITS:
        raise ProtocolError(f"agents do not accept plaintext or route {preface.route}")
    await loop.sock_sendall(connection, encode_answer(version))
    return version


async def _handshake(connection: socket.socket, session: TlsSession) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            done = session.handshake()
        except ssl.SSLError:
            await _send_refusal(connection, session.outgoing())
            raise
        await loop.sock_sendall(connection, session.outgoing())
        if done:
            return
        data = await loop.sock_recv(connection, _CHUNK)
        if not data:
            raise HandshakeError("it closed the connection during the TLS handshake")
        session.feed(data)


async def _send_refusal(connection: socket.socket, words: bytes) -> None:
    """Send the reason and wait until the other side has read it: a reset would discard it."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_LAST_WORDS_S):
            await loop.sock_sendall(connection, words)
            connection.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(connection, _CHUNK):
                pass


def _give_up(connection: socket.socket, link: ControlConnection | None) -> None:
    if link is None or not link.attached:
        connection.close()
    if link is not None:
        link.close("it was not opened")


def _tune(connection: socket.socket, route: int) -> None:
    """Disable Nagle, enable keepalive, and give heartbeats priority where the network supports it."""
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    if sys.platform == "linux":
        options.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_S * 1000))
    if route == ROUTE_AGENT:
        # Both, because a socket of IPv6 may carry IPv4.
        options.append((socket.IPPROTO_IP, socket.IP_TOS, _EXPEDITED))
        if hasattr(socket, "IPV6_TCLASS"):
            options.append((socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _EXPEDITED))
    for level, option, value in options:
        with contextlib.suppress(OSError):
            connection.setsockopt(level, option, value)
