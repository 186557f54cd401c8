"""Link handshakes: dial or accept, preface, TLS, hello. Each is a generator that yields its waits.

Generators keep the steps in reading order, and the event loop that drives them never blocks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import ssl
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from barnraise.core.errors import HandshakeError, ProtocolError, TransportError
from barnraise.identity import WorkerCredentials, WorkerIdentity
from barnraise.identity.node_id import NodeId
from barnraise.transport.ipc.dial_request import DialRequest, ask_broker, take_connection
from barnraise.transport.ipc.messages import IncomingConnection
from barnraise.transport.links import tls
from barnraise.transport.links.frames import HEADER_BYTES, FrameHeader, FrameKind, parse_header
from barnraise.transport.listener import preface

_WORKER_BYTES = 16
MAX_EXTRA_STREAMS = 15
_HELLO_BYTES = HEADER_BYTES + _WORKER_BYTES
_IN_PROGRESS = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", -1))


class SocketWait(Enum):
    """Event that the loop must wait for before it resumes the generator."""

    READ = "read"
    WRITE = "write"


Steps = Generator[tuple[socket.socket, SocketWait], None, "EstablishedLink"]
_SocketSteps = Generator[tuple[socket.socket, SocketWait], None, socket.socket]


@dataclass(frozen=True, slots=True)
class EstablishedLink:
    """Result of a handshake: the peer, the number of the link's stream, and the authenticated socket."""

    worker: bytes
    stream: int
    socket: socket.socket
    node: NodeId | None  # machine whose key signed for the worker; None in plaintext


@dataclass(frozen=True, slots=True)
class HandshakeSecurity:
    """Credentials of this worker, and the nodes it trusts."""

    worker: bytes
    run: str
    secret: bytes
    plaintext: bool
    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    broker: Path | None = None  # opens the connections of a worker in a sandbox

    @classmethod
    def of(
        cls,
        credentials: WorkerCredentials,
        trusted: list[NodeId],
        secret: bytes,
        *,
        plaintext: bool,
        broker: Path | None = None,
    ) -> HandshakeSecurity:
        server = None if plaintext else tls.server_context(credentials, trusted)
        client = None if plaintext else tls.client_context(credentials, trusted)
        return cls(credentials.worker, credentials.run, secret, plaintext, server, client, broker)


def dial(
    address: str,
    port: int,
    worker: bytes,
    stream: int,
    security: HandshakeSecurity,
    first: Callable[[], bool],
) -> Steps:
    """Dial one worker at one address. The result has its id and an authenticated socket.

    ``first`` returns True if this address answered before the others that are tried in parallel.
    """
    open_socket = _connect if security.broker is None else _connect_by_broker
    sock = yield from open_socket(address, port, worker, security)
    try:
        if not first():
            raise TransportError(f"{address}:{port} was not needed, another address answered first")
        if security.broker is None:
            request = preface.Preface(worker, os.urandom(16), plaintext=security.plaintext)
            yield from _write(sock, preface.encode(request, security.secret))
        answer = preface.parse_answer((yield from _read(sock, preface.ANSWER_BYTES)))
        if answer.refusal is not None:
            raise HandshakeError(f"{address}:{port}: {answer.refusal}")
        if answer.plaintext != security.plaintext:
            raise HandshakeError(
                f"{address}:{port} answers {'in plaintext' if answer.plaintext else 'encrypted'} only",
                hint="Use the same network.encryption on both machines.",
            )
        node: NodeId | None = None
        if security.client is not None:
            sock = security.client.wrap_socket(sock, do_handshake_on_connect=False)
            yield from _tls_handshake(sock)
            node = tls.peer(sock, run=security.run, expect_worker=worker).node
        received, _ = yield from _hello(sock, security, stream)
        if received != worker:
            raise HandshakeError(f"{address}:{port} is worker {received.hex()[:8]}, not {worker.hex()[:8]}")
        return EstablishedLink(received, stream, sock, node)
    except BaseException:
        sock.close()
        raise


def _reason(code: int) -> str:
    """Return what the error number of a socket means. On Windows these are not those of files."""
    if sys.platform == "win32":
        return ctypes.FormatError(code)
    return os.strerror(code)


def _connect(address: str, port: int, worker: bytes, security: HandshakeSecurity) -> _SocketSteps:
    """Connect to one address of a machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            code = sock.connect_ex((address, port))
        except (ValueError, TypeError) as error:  # the address is from the store and may be any text
            raise TransportError(f"{address[:60]!r} is not an address") from error
        if code not in _IN_PROGRESS:
            raise TransportError(f"{address}:{port} cannot be dialled: {_reason(code)}")
        yield sock, SocketWait.WRITE
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise TransportError(f"{address}:{port} cannot be dialled: {_reason(code)}")
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_by_broker(address: str, port: int, worker: bytes, security: HandshakeSecurity) -> _SocketSteps:
    """Let the broker connect and send the preface: a sandbox has neither a network nor the secret."""
    assert security.broker is not None
    request = DialRequest(address, port, worker, security.plaintext)
    channel = ask_broker(security.broker, request)
    try:
        channel.setblocking(False)
        while (sock := take_connection(channel)) is None:
            yield channel.connection, SocketWait.READ
    finally:
        channel.close()
    sock.setblocking(False)
    return sock


def accept(sock: socket.socket, incoming: IncomingConnection, security: HandshakeSecurity) -> Steps:
    """Serve a connection whose preface the listener has checked."""
    try:
        sock.setblocking(False)
        version = preface.negotiate(incoming.version_min, incoming.version_max)
        if version is None:
            yield from _write(sock, preface.refuse_version())
            raise HandshakeError(f"{incoming.peer_address} has no common protocol version with this machine")
        yield from _write(sock, preface.encode_answer(version, plaintext=security.plaintext))
        if incoming.plaintext != security.plaintext:
            raise HandshakeError(
                f"{incoming.peer_address} wants {'plaintext' if incoming.plaintext else 'encryption'}",
                hint="Use the same network.encryption on both machines.",
            )
        expected: WorkerIdentity | None = None
        if security.server is not None:
            sock = security.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            yield from _tls_handshake(sock)
            expected = tls.peer(sock, run=security.run)
        received, stream = yield from _hello(sock, security, 0)
        if expected is not None and received != expected.worker:
            raise HandshakeError("the hello and the certificate of the other side name different workers")
        return EstablishedLink(received, stream, sock, expected.node if expected is not None else None)
    except BaseException:
        sock.close()
        raise


def _hello(
    sock: socket.socket, security: HandshakeSecurity, stream: int
) -> Generator[tuple[socket.socket, SocketWait], None, tuple[bytes, int]]:
    """Exchange hellos with our worker id and the stream number. The number in the reply is ignored."""
    header = FrameHeader(FrameKind.HELLO, length=_WORKER_BYTES, first=stream)
    yield from _write(sock, header.encode() + security.worker)
    data = yield from _read(sock, _HELLO_BYTES)
    received = parse_header(data)
    if (
        received.kind is not FrameKind.HELLO
        or received.length != _WORKER_BYTES
        or received.first > MAX_EXTRA_STREAMS
    ):
        raise ProtocolError("the first frame must be a hello")
    if data[HEADER_BYTES:] == security.worker:
        raise HandshakeError("the other side claims to be this worker")
    return data[HEADER_BYTES:], received.first


def _tls_handshake(sock: ssl.SSLSocket) -> Generator[tuple[socket.socket, SocketWait], None, None]:
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            yield sock, SocketWait.READ
        except ssl.SSLWantWriteError:
            yield sock, SocketWait.WRITE
        except ssl.SSLCertVerificationError as error:
            raise HandshakeError(
                f"the other machine's key is not trusted here ({error.verify_message})"
            ) from error
        except (ssl.SSLError, OSError) as error:
            raise HandshakeError(f"the other side aborted the TLS handshake ({error})") from error


def _write(sock: socket.socket, data: bytes) -> Generator[tuple[socket.socket, SocketWait], None, None]:
    while data:
        try:
            data = data[sock.send(data) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            yield sock, SocketWait.WRITE
        except ssl.SSLWantReadError:
            yield sock, SocketWait.READ
        except OSError as error:
            raise HandshakeError(f"the other side closed the connection ({error})") from error


def _read(sock: socket.socket, size: int) -> Generator[tuple[socket.socket, SocketWait], None, bytes]:
    data = b""
    while len(data) < size:
        try:
            chunk = sock.recv(size - len(data))
        except (BlockingIOError, ssl.SSLWantReadError):
            yield sock, SocketWait.READ
            continue
        except ssl.SSLWantWriteError:
            yield sock, SocketWait.WRITE
            continue
        except OSError as error:
            raise HandshakeError(f"the other side closed the connection ({error})") from error
        if not chunk:
            raise HandshakeError(
                "the other side closed the connection during the handshake",
                hint="Make sure that both machines trust each other's id and share one secret.",
            )
        data += chunk
    return data
