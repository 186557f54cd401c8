"""Targets with a state: streams of frames, handshakes, and a group with one hostile member."""

from __future__ import annotations

import contextlib
import socket
from random import Random

from barnraise.collectives.comm_process.links.handshakes import HandshakeSecurity, SocketWait, Steps, accept
from barnraise.core.errors import BarnraiseError, ProtocolError
from barnraise.identity import NodeKey, delegate
from barnraise.testing.memory_link import MemoryLink
from barnraise.transport.ipc.messages import IncomingConnection
from barnraise.transport.links.frames import BULK, FrameHeader, FrameKind
from benchmarks.attacks.fuzz.hostile_peer import Session
from benchmarks.attacks.fuzz.mutation import mutated

GROUP = 100  # cases for each seed; a tenth of it where a case is long
_SECRET = bytes(range(32))
_NODE = NodeKey.generate()
_CREDENTIALS = delegate(_NODE, run="run", worker=b"W" * 16)


class _Taker:
    def target(self, link: object, header: FrameHeader) -> memoryview | None:
        return None if header.first % 2 else memoryview(bytearray(header.length))

    def frame(self, link: object, header: FrameHeader, payload: memoryview) -> None:
        assert len(payload) == header.length

    def sent(self, link: object, token: object) -> None: ...


def reader_cases(random: Random) -> None:
    """Feed streams of frames with a few changed bytes, cut at random places."""
    for _ in range(GROUP // 10):
        wire = b""
        for _ in range(10):
            kind = random.choice(list(FrameKind))
            length = random.choice((0, 1, 40, 2000, 20_000 if kind in BULK else 50))
            wire += FrameHeader(kind, length, 1, 2, random.randrange(4), 0).encode() + bytes(length)
        reader = MemoryLink(_Taker(), 0).reader
        data, at = mutated(random, wire), 0
        with contextlib.suppress(ProtocolError):
            while at < len(data):
                space = reader.space()
                assert len(space) > 0
                count = min(len(space), len(data) - at, random.choice((1, 33, 1000, 100_000)))
                space[:count] = data[at : at + count]
                reader.advance(count)
                at += count


_SECURITIES: dict[bool, HandshakeSecurity] = {}


def handshake_cases(random: Random) -> None:
    """Run handshakes with a caller that sends anything after its preface, with and without TLS."""
    for _ in range(GROUP // 10):
        plaintext = random.random() < 0.5
        if plaintext not in _SECURITIES:
            _SECURITIES[plaintext] = HandshakeSecurity.of(
                _CREDENTIALS, [_NODE.id], _SECRET, plaintext=plaintext
            )
        ours, theirs = socket.socketpair()
        hello = FrameHeader(FrameKind.HELLO, 16).encode() + b"X" * 16
        start = bytes.fromhex("160301") if random.random() < 0.5 else b""
        data = mutated(random, hello) if plaintext else start + random.randbytes(random.randrange(1, 300))
        theirs.sendall(data)
        if random.random() < 0.7:
            theirs.shutdown(socket.SHUT_WR)
        with theirs:
            incoming = IncomingConnection(bytes(16), "192.0.2.1", 1, 1, plaintext)
            _drive(accept(ours, incoming, _SECURITIES[plaintext]))


def _drive(steps: Steps) -> None:
    """Run the handshake like the communication process's loop, but with a limited number of reads."""
    reads = 0
    try:
        while reads < 3:
            _, want = next(steps)
            reads += want is SocketWait.READ
        steps.close()
    except StopIteration as finished:
        finished.value.socket.close()
    except (BarnraiseError, OSError):
        pass


def engine_cases(random: Random) -> None:
    session = Session(random.getrandbits(60))
    for _ in range(GROUP // 25):
        session.attack(25)
