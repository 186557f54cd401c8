"""Attacks on a worker's port: by strangers, and by workers of machines that the run trusts."""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable

import msgspec

from barnraise.identity import NodeKey, delegate
from barnraise.transport.links import tls
from barnraise.transport.links.frames import MAX_CONTROL, FrameHeader, FrameKind
from barnraise.transport.listener import preface
from benchmarks.attacks.registry import Role, attack
from benchmarks.attacks.scenes.group import WAIT_S, AttackedGroup, Target, take

Function = Callable[[Target], socket.socket | None]


def _attack(id: str, role: Role, text: str, ended: str) -> Callable[[Function], Function]:
    """Register an attack on one worker; a connection that it returns stays open while memory is measured."""

    def register(function: Function) -> Function:
        def tried(group: AttackedGroup) -> str:
            kept = function(group.target)
            group.check_growth()
            if kept is not None:
                kept.close()
            return ended

        attack(id, role, text, AttackedGroup)(tried)
        return function

    return register


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


@_attack("lan-wrong-secret", "person on the LAN", "dials a worker with another discovery secret", "no answer")
def wrong_secret(target: Target) -> None:
    sock = target.send_preface(secret=bytes(32))
    sock.settimeout(WAIT_S)
    assert sock.recv(1) == b"", "a stranger got an answer"
    sock.close()


@_attack("lan-replay-preface", "person on the LAN", "replays the preface of a worker", "no answer")
def replayed_preface(target: Target) -> None:
    log_tail = preface.encode(preface.Preface(target.worker, os.urandom(16)), target.secret)
    first, second = target.connect(), target.connect()
    first.sendall(log_tail)
    assert not preface.parse_answer(take(first, preface.ANSWER_BYTES)).refusal
    second.sendall(log_tail)
    assert second.recv(1) == b"", "a replay got an answer"
    first.close()
    second.close()


@_attack(
    "lan-unknown-worker",
    "person on the LAN",
    "asks for a worker that does not exist, with the stolen secret",
    "refused and closed",
)
def unknown_worker(target: Target) -> None:
    sock = target.connect()
    sock.sendall(preface.encode(preface.Preface(os.urandom(16), os.urandom(16)), target.secret))
    assert preface.parse_answer(take(sock, preface.ANSWER_BYTES)).refusal
    _all_shut([sock])


@_attack(
    "lan-untrusted-key",
    "person on the LAN",
    "dials a worker with a key that is not trusted",
    "TLS rejected it",
)
def untrusted_key(target: Target) -> None:
    _all_shut(target.tls_handshake(NodeKey.generate(), target.run) for _ in range(3))


@_attack("guest-wrong-run", "guest", "dials a worker with a certificate of another run", "closed")
def wrong_run(target: Target) -> None:
    _all_shut(target.tls_handshake(target.key, "another run") for _ in range(3))


@_attack(
    "lan-garbage-after-preface",
    "person on the LAN",
    "sends garbage to a worker after a valid preface",
    "closed",
)
def garbage_after_preface(target: Target) -> None:
    source = random.Random(7)
    socks = []
    for _ in range(10):
        sock = target.send_preface()
        sock.sendall(source.randbytes(2000))
        socks.append(sock)
    _all_shut(socks)


# silent and slow connections


@_attack(
    "lan-silent-at-worker", "person on the LAN", "opens 500 silent connections to a worker", "all were closed"
)
def silent_connections(target: Target) -> None:
    _all_shut([target.connect() for _ in range(500)])


@_attack("lan-half-prefaces", "person on the LAN", "sends half prefaces to a worker", "all were closed")
def half_prefaces(target: Target) -> None:
    log_tail = preface.encode(preface.Preface(target.worker, os.urandom(16)), target.secret)
    socks = [target.connect() for _ in range(40)]
    for sock in socks:
        sock.sendall(log_tail[: preface.PREFACE_BYTES // 2])
    _all_shut(socks)


@_attack("lan-stalled-handshakes", "person on the LAN", "stops after a valid preface", "the worker timed out")
def stalled_handshakes(target: Target) -> None:
    """Send a valid preface and then nothing: the worker itself must time out."""
    _all_shut([target.send_preface() for _ in range(40)])


@_attack("guest-stalled-hello", "guest", "stops after TLS", "the worker timed out")
def stalled_hello(target: Target) -> None:
    sock = target.send_preface()
    take(sock, preface.ANSWER_BYTES)
    context = tls.client_context(delegate(target.key, run=target.run, worker=os.urandom(16)), [target.key.id])
    _all_shut([context.wrap_socket(sock)])


@_attack("guest-silent-link", "guest", "stops in the middle of a header", "the silence limit closed the link")
def silent_link(target: Target) -> None:
    """Perform a whole handshake, send half a header, then nothing: the silence limit closes the link."""
    sock = target.open_link()
    sock.sendall(FrameHeader(FrameKind.DATA, length=1 << 20, group=target.group).encode()[:10])
    _all_shut([sock])


# liars with a right key


def _raw(kind: int, length: int = 0, group: int = 0, sequence: int = 0, flags: int = 0) -> bytes:
    return struct.pack("<BBHIQQII", kind, flags, 0, length, group, sequence, 1, 1)


@_attack(
    "guest-huge-lengths", "guest", "sends the largest lengths in every kind of frame", "each link was closed"
)
def huge_lengths(target: Target) -> None:
    """Send lengths and numbers at the limits of their fields, in every kind of frame."""
    for kind in FrameKind:
        sock = target.open_link()
        sock.sendall(_raw(kind, length=0xFFFFFFFF, group=target.group, sequence=1 << 60))
        _all_shut([sock])


@_attack("guest-unknown-frames", "guest", "sends unknown kinds of frames and flags", "each link was closed")
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


@_attack(
    "guest-frames-for-others",
    "guest",
    "sends frames for a group in which it has no part",
    "the group went on with right sums",
)
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


@_attack("guest-borrowed-name", "guest", "claims the worker id of another machine", "no link and no stream")
def borrowed_name(target: Target) -> None:
    """Use a worker id of another machine. The peer gets neither a link nor a stream."""
    for stream in (0, 1):
        _all_shut([target.tls_handshake(target.friend, target.run, target.member, stream)])


def _join_body(generation: int, name: str, extra: bytes = b"") -> bytes:
    body = msgspec.msgpack.encode((generation, name, 0, 2, bytes(16)))
    return bytes([body[0] + 1]) + body[1:] + extra if extra else body


@_attack("guest-old-generation", "guest", "joins with an old generation", "told that it is over")
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


@_attack("guest-nested-joins", "guest", "sends a message that is nested 30,000 deep", "the link was closed")
def nested_joins(target: Target) -> None:
    """Send msgpack that is nested too deeply for any parser."""
    sock = target.open_link()
    body = _join_body(target.generation, "deep", b"\x91" * 30_000 + b"\xc0")
    sock.sendall(FrameHeader(FrameKind.JOIN, length=len(body), group=78).encode() + body)
    _all_shut([sock])


@_attack("guest-endless-joins", "guest", "joins 3,000 groups that never form", "memory stayed bounded")
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


@_attack("guest-endless-pings", "guest", "asks 400,000 times and reads no answer", "memory stayed bounded")
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
