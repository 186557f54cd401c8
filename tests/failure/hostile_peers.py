"""Attacks by unauthenticated and hostile peers. Each attack checks that it had no effect."""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from barnraise.identity import NodeKey, delegate
from barnraise.transport.links import tls
from barnraise.transport.links.frames import HEADER_BYTES, MAX_CONTROL, FrameHeader, FrameKind
from barnraise.transport.listener import preface

WAIT_S = 40.0  # much longer than every deadline that a stalled stranger can have
_HELLO_BYTES = HEADER_BYTES + 16


@dataclass(frozen=True)
class Target:
    """A worker under attack, with all data that its trusted peers have."""

    port: int
    worker: bytes
    secret: bytes
    key: NodeKey
    friend: NodeKey  # of another machine, which is trusted too
    member: bytes  # another worker of the group
    run: str
    generation: int
    group: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S)

    def send_preface(self, secret: bytes | None = None) -> socket.socket:
        """Connect and send a valid preface, unless another secret is given."""
        sock = self.connect()
        sock.sendall(preface.encode(preface.Preface(self.worker, os.urandom(16)), secret or self.secret))
        return sock

    def tls_handshake(
        self, key: NodeKey, run: str, worker: bytes | None = None, stream: int = 0
    ) -> ssl.SSLSocket:
        """Perform TLS as a worker of that node and run. In TLS 1.3 the rejection arrives only afterwards."""
        sock = self.send_preface()
        assert not preface.parse_answer(_take(sock, preface.ANSWER_BYTES)).refusal
        name = worker or os.urandom(16)
        context = tls.client_context(delegate(key, run=run, worker=name), [self.key.id])
        wrapped = context.wrap_socket(sock)
        try:
            wrapped.sendall(FrameHeader(FrameKind.HELLO, length=16, first=stream).encode() + name)
        except OSError:
            pass  # the refusal was faster
        return wrapped

    def open_link(self) -> ssl.SSLSocket:
        """Open a link as a trusted worker of the run that is in none of the groups."""
        sock = self.tls_handshake(self.key, self.run)
        assert _take(sock, _HELLO_BYTES)[0] == FrameKind.HELLO
        return sock


def _take(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "the other side hung up"
        data += piece
    return data


def is_shut(sock: socket.socket) -> bool:
    """Return True if the other side closes the connection. Data that arrives before is ignored."""
    sock.settimeout(WAIT_S)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except (ssl.SSLError, OSError):
        pass
    sock.close()
    return True


def _all_shut(socks: Iterable[socket.socket]) -> None:
    assert all(is_shut(sock) for sock in list(socks)), "a connection was kept"


# without the secret, or with a stolen one


def wrong_secret(target: Target) -> None:
    sock = target.send_preface(secret=bytes(32))
    sock.settimeout(WAIT_S)
    assert sock.recv(1) == b"", "a stranger got an answer"
    sock.close()


def replayed_preface(target: Target) -> None:
    log_tail = preface.encode(preface.Preface(target.worker, os.urandom(16)), target.secret)
    first, second = target.connect(), target.connect()
    first.sendall(log_tail)
    assert not preface.parse_answer(_take(first, preface.ANSWER_BYTES)).refusal
    second.sendall(log_tail)
    assert second.recv(1) == b"", "a replay got an answer"
    first.close()
    second.close()


def unknown_worker(target: Target) -> None:
    sock = target.connect()
    sock.sendall(preface.encode(preface.Preface(os.urandom(16), os.urandom(16)), target.secret))
    assert preface.parse_answer(_take(sock, preface.ANSWER_BYTES)).refusal
    _all_shut([sock])


def untrusted_key(target: Target) -> None:
    _all_shut(target.tls_handshake(NodeKey.generate(), target.run) for _ in range(3))


def wrong_run(target: Target) -> None:
    _all_shut(target.tls_handshake(target.key, "another run") for _ in range(3))


def garbage_after_preface(target: Target) -> None:
    source = random.Random(7)
    socks = []
    for _ in range(10):
        sock = target.send_preface()
        sock.sendall(source.randbytes(2000))
        socks.append(sock)
    _all_shut(socks)


# silent and slow connections


def silent_connections(target: Target) -> None:
    _all_shut([target.connect() for _ in range(500)])


def half_prefaces(target: Target) -> None:
    log_tail = preface.encode(preface.Preface(target.worker, os.urandom(16)), target.secret)
    socks = [target.connect() for _ in range(40)]
    for sock in socks:
        sock.sendall(log_tail[: preface.PREFACE_BYTES // 2])
    _all_shut(socks)


def stalled_handshakes(target: Target) -> None:
    """Send a valid preface and then nothing: the worker itself must time out."""
    _all_shut([target.send_preface() for _ in range(40)])


def stalled_hello(target: Target) -> None:
    sock = target.send_preface()
    _take(sock, preface.ANSWER_BYTES)
    context = tls.client_context(delegate(target.key, run=target.run, worker=os.urandom(16)), [target.key.id])
    _all_shut([context.wrap_socket(sock)])


def silent_link(target: Target) -> None:
    """Perform a whole handshake, send half a header, then nothing: the silence limit closes the link."""
    sock = target.open_link()
    sock.sendall(FrameHeader(FrameKind.DATA, length=1 << 20, group=target.group).encode()[:10])
    _all_shut([sock])


# liars with a right key


def _raw(kind: int, length: int = 0, group: int = 0, sequence: int = 0, flags: int = 0) -> bytes:
    return struct.pack("<BBHIQQII", kind, flags, 0, length, group, sequence, 1, 1)


def huge_lengths(target: Target) -> None:
    """Send lengths and numbers at the limits of their fields, in every kind of frame."""
    for kind in FrameKind:
        sock = target.open_link()
        sock.sendall(_raw(kind, length=0xFFFFFFFF, group=target.group, sequence=1 << 60))
        _all_shut([sock])


def unknown_kinds(target: Target) -> None:
    for log_tail in (
        _raw(0),
        _raw(99),
        _raw(255),
        _raw(FrameKind.PING, flags=1),
        _raw(FrameKind.OPEN, group=0),
    ):
        sock = target.open_link()
        sock.sendall(log_tail)
        _all_shut([sock])


def frames_for_a_group_of_others(target: Target) -> None:
    """Send frames for a group that this worker is not in. They must not fail it or change a byte."""
    failure = msgspec.msgpack.encode(("peer-lost", "a lie", 0, ()))
    for kind in (
        FrameKind.FAIL,
        FrameKind.LEAVE,
        FrameKind.OPEN,
        FrameKind.TABLE,
        FrameKind.OFFER,
        FrameKind.JOIN,
        FrameKind.TELL,
    ):
        sock = target.open_link()
        sock.sendall(
            FrameHeader(kind, length=len(failure), group=target.group, sequence=1).encode() + failure
        )
        _all_shut([sock])
    sock = target.open_link()
    for kind in (FrameKind.DATA, FrameKind.PARCEL, FrameKind.EAGER):
        try:
            sock.sendall(
                FrameHeader(kind, length=100_000, group=target.group, sequence=5).encode() + bytes(100_000)
            )
        except OSError:
            break  # it has had enough already
    sock.close()


def borrowed_name(target: Target) -> None:
    """Claim a worker id of another machine. The peer gets neither a link nor a stream."""
    for stream in (0, 1):
        _all_shut([target.tls_handshake(target.friend, target.run, target.member, stream)])


def _join_body(generation: int, name: str, extra: bytes = b"") -> bytes:
    body = msgspec.msgpack.encode((generation, name, 0, 2, bytes(16)))
    return bytes([body[0] + 1]) + body[1:] + extra if extra else body


def old_generation(target: Target) -> None:
    """Join with an old generation. The reply names the current one."""
    sock = target.open_link()
    body = _join_body(target.generation - 1, "old")
    sock.sendall(FrameHeader(FrameKind.JOIN, length=len(body), group=77).encode() + body)
    deadline = time.monotonic() + WAIT_S
    received = b""
    while b"is over" not in received:
        assert time.monotonic() < deadline, "no refusal of an old generation"
        received += sock.recv(1 << 16)
    sock.close()


def nested_joins(target: Target) -> None:
    """Send msgpack that is nested too deeply for any parser."""
    sock = target.open_link()
    body = _join_body(target.generation, "deep", b"\x91" * 30_000 + b"\xc0")
    sock.sendall(FrameHeader(FrameKind.JOIN, length=len(body), group=78).encode() + body)
    _all_shut([sock])


def endless_joins(target: Target) -> socket.socket:
    """Send joins of groups that never form, as large as a frame may be."""
    sock = target.open_link()
    sock.settimeout(8.0)
    try:
        for number in range(3000):
            body = _join_body(target.generation, f"{number:08d}" + "x" * (MAX_CONTROL - 200))
            sock.sendall(FrameHeader(FrameKind.JOIN, length=len(body), group=1000 + number).encode() + body)
    except OSError:
        pass  # it has had enough
    return sock


def questions_without_end(target: Target) -> socket.socket:
    """Send queries without reading: the replies must not fill the memory."""
    sock = target.open_link()
    question = FrameHeader(FrameKind.PING).encode() * 2000
    sock.settimeout(2.0)
    try:
        for _ in range(200):
            sock.sendall(question)
    except OSError:  # a timeout is one too: it no longer reads
        pass
    return sock


# an attack may return a connection that is to stay open while its effect is measured
ATTACKS: dict[str, Callable[[Target], socket.socket | None]] = {
    attack.__name__.replace("_", " "): attack
    for attack in (
        wrong_secret,
        replayed_preface,
        unknown_worker,
        untrusted_key,
        wrong_run,
        garbage_after_preface,
        silent_connections,
        half_prefaces,
        stalled_handshakes,
        stalled_hello,
        silent_link,
        huge_lengths,
        unknown_kinds,
        frames_for_a_group_of_others,
        borrowed_name,
        old_generation,
        nested_joins,
        endless_joins,
        questions_without_end,
    )
}

__all__ = ["ATTACKS", "Target"]
