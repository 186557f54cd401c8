"""Pairs of connected links of every kind, and a handler that records its calls."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from barnraise.core.errors import ProtocolError
from barnraise.identity import NodeKey, delegate
from barnraise.testing.memory_link import memory_pair
from barnraise.transport.links.link import FrameHeader, Link
from barnraise.transport.links.stream import StreamLink, tune
from barnraise.transport.links.tls import client_context, server_context


@dataclass
class Owner:
    """Handler that records its calls. ``places``: target memory of a payload, by its ``first``."""

    places: dict[int, memoryview | None] = field(default_factory=dict)
    frames: list[tuple[FrameHeader, bytes]] = field(default_factory=list)
    tokens: list[object] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)
    refuse: Callable[[FrameHeader], bool] = lambda header: False

    def target(self, link: Link, header: FrameHeader) -> memoryview | None:
        if header.first in self.places:
            return self.places[header.first]
        return memoryview(bytearray(header.length))

    def frame(self, link: Link, header: FrameHeader, payload: memoryview) -> None:
        if self.refuse(header):
            raise ProtocolError("not this one")
        self.frames.append((header, bytes(payload)))
        self.payloads.append(payload)

    def sent(self, link: Link, token: object) -> None:
        self.tokens.append(token)


@dataclass
class Pair:
    """Two ends of a link and their owners."""

    left: Link
    right: Link
    sender: Owner
    receiver: Owner

    def pump(self, until: Callable[[], bool], seconds: float = 60.0) -> None:
        """Move bytes both ways until the condition holds."""
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, "it did not happen in time"
            for link in (self.left, self.right):
                link.flush()
                link.receive()

    def close(self) -> None:
        self.left.close("the test is over")
        self.right.close("the test is over")


def in_memory() -> Pair:
    sender, receiver = Owner(), Owner()
    left, right = memory_pair(sender, receiver, capacity=100_000)
    return Pair(left, right, sender, receiver)


def sockets() -> tuple[socket.socket, socket.socket]:
    """Return connected sockets over loopback with buffers as small as possible, so that they fill."""
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        door.bind(("127.0.0.1", 0))
        door.listen(1)
        left = socket.socket()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        left.connect(door.getsockname())
        right, _ = door.accept()
    return left, right


def plaintext() -> Pair:
    return _streams(*sockets())


def encrypted() -> Pair:
    left, right = sockets()
    client_key, server_key = NodeKey.generate(), NodeKey.generate()
    trusted = [client_key.id, server_key.id]
    client = client_context(delegate(client_key, run="run", worker=b"1" * 16), trusted)
    server = server_context(delegate(server_key, run="run", worker=b"2" * 16), trusted)
    accepted: list[socket.socket] = []
    thread = threading.Thread(target=lambda: accepted.append(server.wrap_socket(right, server_side=True)))
    thread.start()
    dialled = client.wrap_socket(left)
    thread.join(90)
    return _streams(dialled, accepted[0])


def _streams(left: socket.socket, right: socket.socket) -> Pair:
    sender, receiver = Owner(), Owner()
    for sock in (left, right):
        tune(sock, silence_s=60.0)
    return Pair(StreamLink(left, sender), StreamLink(right, receiver), sender, receiver)


KINDS: dict[str, Callable[[], Pair]] = {"memory": in_memory, "plaintext": plaintext, "tls": encrypted}
