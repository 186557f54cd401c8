"""A peer with a valid link that says anything: at worst its own link ends, and nothing grows."""

from __future__ import annotations

import socket
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from barnraise.collectives.comm_process import engine, group, point_to_point
from barnraise.collectives.comm_process.group import JoinBody
from barnraise.collectives.comm_process.links import handshakes
from barnraise.collectives.comm_process.links.handshakes import HandshakeSecurity
from barnraise.collectives.messages import (
    Failure,
    OperationFailed,
    OperationSpec,
    StartOperation,
    encode_specification,
)
from barnraise.core.errors import BarnraiseError, HandshakeError, ProtocolError
from barnraise.transport.ipc.messages import IncomingConnection
from barnraise.transport.links.frames import EAGER_BYTES, FrameHeader, FrameKind
from barnraise.transport.listener.preface import encode_answer
from benchmarks.attacks.fuzz.hostile_peer import FRIEND, HOSTILE, Session
from benchmarks.attacks.fuzz.targets import SESSIONS, run_target

MEBI = 1 << 20


@pytest.mark.parametrize("target", SESSIONS)
def test_fuzzer_short_run_finds_no_crash(target: str) -> None:
    assert list(run_target(target, 400 if target != "handshake" else 50, seed=9000))


def say(session: Session, header: FrameHeader, payload: bytes = b"") -> str | None:
    """Deliver one frame; the reason if it ended the link."""
    session.hostile.arrive(header._replace(length=len(payload)).encode() + payload)
    while session.hostile.is_readable:
        session.hostile.receive()
    return session.hostile.closed


def undisturbed(session: Session) -> None:
    """The group with the friend still works."""
    assert session.links[0].closed is None
    session._good_round()


def specification(**changes: Any) -> bytes:
    return encode_specification(
        msgspec.structs.replace(
            OperationSpec("all_reduce", 8, "sum", -1, "ring", (4096,), 1024, 2), **changes
        )
    )


Flood = Callable[[Session, int], tuple[FrameHeader, bytes]]
FLOODS: dict[str, Flood] = {
    "pings that are never answered to": lambda s, n: (FrameHeader(FrameKind.PING, first=n), b""),
    "questions": lambda s, n: (FrameHeader(FrameKind.ASK, group=s.bad, sequence=n % 2), b""),
    "answers": lambda s, n: (FrameHeader(FrameKind.TELL, group=s.bad, sequence=n), b""),
    "empty data": lambda s, n: (FrameHeader(FrameKind.DATA, group=s.bad, sequence=50, first=n), b""),
    "data ahead": lambda s, n: (
        FrameHeader(FrameKind.DATA, group=s.bad, sequence=50 + n),
        bytes(EAGER_BYTES),
    ),
    "starts": lambda s, n: (FrameHeader(FrameKind.OPEN, group=s.bad, sequence=50 + n), b"x" * 30_000),
    "small starts": lambda s, n: (FrameHeader(FrameKind.OPEN, group=s.bad, sequence=50 + n), b""),
    "messages": lambda s, n: (
        FrameHeader(FrameKind.EAGER, group=s.bad, sequence=n, first=77),
        bytes(EAGER_BYTES),
    ),
    "offers": lambda s, n: (FrameHeader(FrameKind.OFFER, group=s.bad, sequence=n, first=77), bytes(8)),
    "stale joins": lambda s, n: (
        FrameHeader(FrameKind.JOIN, group=n + 1),
        msgspec.msgpack.encode(JoinBody(1, "old", 0, 2, b"")),
    ),
    "joins": lambda s, n: (
        FrameHeader(FrameKind.JOIN, group=n + 1),
        msgspec.msgpack.encode(JoinBody(2, "x" * 3000, 0, 2, b"")),
    ),
    "probes": lambda s, n: (FrameHeader(FrameKind.PROBE, first=0, second=1), b""),
    "probe results": lambda s, n: (FrameHeader(FrameKind.PROBED), bytes(16)),
    "data of an unknown group": lambda s, n: (FrameHeader(FrameKind.DATA, group=9, sequence=n), bytes(4096)),
    "failures of an unknown group": lambda s, n: (FrameHeader(FrameKind.FAIL, group=9), b"x" * 30_000),
}


CUT_OFF = {"empty data", "data ahead", "starts", "small starts", "messages", "offers", "probes"}


@pytest.fixture
def _low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are for large worlds; a test of them should be short."""
    monkeypatch.setattr(group, "_MAX_EARLY_BYTES", 64 << 10)
    monkeypatch.setattr(group, "_MAX_EARLY_STARTS", 1000)
    monkeypatch.setattr(group, "_MAX_EARLY_START_BYTES", 256 << 10)
    monkeypatch.setattr(point_to_point, "MAX_OFFERS", 1000)
    monkeypatch.setattr(engine, "_MAX_REPLY_BYTES", 32 << 10)


@pytest.mark.usefixtures("_low_limits")
@pytest.mark.parametrize("flood", FLOODS)
def test_frame_flood_does_not_grow_memory(flood: str) -> None:
    session = Session(1)
    for number in range(300):  # what a link and its answers need
        say(session, *FLOODS[flood](session, number))
    tracemalloc.start()
    for number in range(300, 3000):
        if say(session, *FLOODS[flood](session, number)) is not None:
            break
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    reason = session.hostile.closed
    assert (reason is not None) == (flood in CUT_OFF), reason
    assert reason is None or reason.startswith("it broke the protocol: ")
    assert grown < MEBI
    undisturbed(session)


SILLY: dict[str, Callable[[Session], tuple[FrameHeader, bytes]]] = {
    "a second hello": lambda s: (FrameHeader(FrameKind.HELLO), bytes(16)),
    "a group frame without a group": lambda s: (FrameHeader(FrameKind.OPEN), specification()),
    "a frame of a group it is not in": lambda s: (FrameHeader(FrameKind.OPEN, group=s.good), specification()),
    "a failure of a group it is not in": lambda s: (
        FrameHeader(FrameKind.FAIL, group=s.good),
        msgspec.msgpack.encode(Failure("peer-lost", "ha", 1)),
    ),
    "data of 1 MiB ahead": lambda s: (FrameHeader(FrameKind.DATA, group=s.bad, sequence=50), bytes(MEBI)),
    "an eager message that is not small": lambda s: (
        FrameHeader(FrameKind.EAGER, group=s.bad),
        bytes(EAGER_BYTES + 1),
    ),
    "an accepted message that was never offered": lambda s: (
        FrameHeader(FrameKind.ACCEPT, group=s.bad, sequence=99),
        b"",
    ),
    "an offer of no size": lambda s: (FrameHeader(FrameKind.OFFER, group=s.bad), b""),
    "an offer of nine bytes": lambda s: (FrameHeader(FrameKind.OFFER, group=s.bad), bytes(9)),
    "a cost table of rank 1": lambda s: (FrameHeader(FrameKind.TABLE, group=s.bad), b"\x80"),
    "a cost that is no number": lambda s: (
        FrameHeader(FrameKind.MEASURE, group=s.bad),
        b"\x81\xa9latency_s\xcb\x7f\xf8\0\0\0\0\0\0",
    ),
    "a probe of 1 MiB": lambda s: (FrameHeader(FrameKind.PROBE), bytes(MEBI)),
    "a probe result of three bytes": lambda s: (FrameHeader(FrameKind.PROBED), b"abc"),
    "a lost peer of another world": lambda s: (
        FrameHeader(FrameKind.FAIL, group=s.bad),
        msgspec.msgpack.encode(Failure("peer-lost", "ha", 2)),
    ),
    "a lost peer without a name": lambda s: (
        FrameHeader(FrameKind.FAIL, group=s.bad),
        msgspec.msgpack.encode(Failure("peer-lost", "ha", -1)),
    ),
    "late ranks that are none": lambda s: (
        FrameHeader(FrameKind.FAIL, group=s.bad),
        msgspec.msgpack.encode(Failure("operation-timeout", "ha", -1, (0, 2**40))),
    ),
    "an unknown code": lambda s: (
        FrameHeader(FrameKind.FAIL, group=s.bad),
        msgspec.msgpack.encode(Failure("no-such-code", "ha", 0)),
    ),
    "text that is no text": lambda s: (
        FrameHeader(FrameKind.FAIL, group=s.bad),
        b"\x94\xa1\xff\xa1b\x00\x90",
    ),
}
if sys.version_info < (3, 14):  # from then on such a nest fits the stack, and the field is skipped
    SILLY["nesting without end"] = lambda s: (
        FrameHeader(FrameKind.JOIN, group=s.bad),
        b"\x96\x02\xa1a\x00\x02\xc4\x00" + b"\x91" * 30_000 + b"\xc0",
    )


@pytest.mark.parametrize("silly", SILLY)
def test_protocol_violation_closes_only_that_link(silly: str) -> None:
    session = Session(2)
    assert say(session, *SILLY[silly](session)) is not None
    session.victim.engine.link_down(session.hostile)
    assert HOSTILE not in [peer.worker for peer in session.victim.engine.peers]
    undisturbed(session)


@pytest.mark.parametrize(
    "encoded",
    [b"", b"\xff" * 20, b"\x91" * 30_000 + b"\xc0", b"\x98\xa1\xff", specification(kind="k" * 30_000)],
    ids=["nothing", "garbage", "nested", "no text", "a name of 30,000 letters"],
)
def test_undecodable_start_becomes_mismatch_at_own_start(encoded: bytes) -> None:
    """It waits until then, and must not come back as an error of our own command."""
    session = Session(3)
    assert say(session, FrameHeader(FrameKind.OPEN, group=session.bad, sequence=9), encoded) is None
    number = session._number()
    session.victim.segments[number] = bytearray(4096)
    command = StartOperation(number, session.bad, 9, session.reduce, number, 0, 4096, 60.0)
    session.victim.engine.command(command)
    ended = session.victim.ended[number]
    assert isinstance(ended, OperationFailed)
    assert ended.failure.code == "operation-mismatch"
    assert "rank 1 called" in ended.failure.message
    assert len(msgspec.msgpack.encode(ended.failure)) < 20_000, "it has to fit a control frame"
    undisturbed(session)


def test_join_with_wrong_rank_fails_only_that_group() -> None:
    session = Session(4)
    body = msgspec.msgpack.encode(JoinBody(2, f"bad{session.bad_groups}", 0, 2, bytes(16)))
    say(session, FrameHeader(FrameKind.JOIN, group=session.bad), body)
    failure = session.victim.engine._groups[session.bad].failure
    assert failure is not None
    assert "it says it is rank 0 of 2" in failure.message
    undisturbed(session)


def test_early_joins_of_one_peer_do_not_evict_anothers() -> None:
    session = Session(5)
    friend_link, victim_link = session.links[1], session.links[0]
    body = msgspec.msgpack.encode(JoinBody(2, "soon", 1, 2, b""))
    friend_link.send(FrameHeader(FrameKind.JOIN, group=1234), body)
    friend_link.flush()
    victim_link.receive()
    for number in range(1000):
        say(session, *FLOODS["joins"](session, number + 5000))
    assert 1234 in session.victim.engine._early_joins._stored[FRIEND]


# handshakes


def meet(received: bytes, make: Callable[[socket.socket], handshakes.Steps]) -> BaseException:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(received)
        theirs.shutdown(socket.SHUT_WR)
        steps = make(ours)
        try:
            for _ in range(100):
                next(steps)
        except BarnraiseError as error:
            assert ours.fileno() == -1, "the socket is closed"
            return error
        except StopIteration as finished:
            finished.value.socket.close()
            return finished
    raise AssertionError("the handshake does not end")


def in_the_clear(worker: bytes) -> HandshakeSecurity:
    return HandshakeSecurity(worker, "run", bytes(32), True, None, None)


INCOMING = IncomingConnection(bytes(16), "192.0.2.1", 1, 1, True)


@pytest.mark.parametrize(
    "received",
    [
        b"",
        b"x" * 47,
        b"\xff" * 48,
        FrameHeader(FrameKind.PING, 16).encode() + bytes(16),
        FrameHeader(FrameKind.HELLO, 15).encode() + bytes(16),
        FrameHeader(FrameKind.HELLO, 16, first=2**31).encode() + bytes(16),
        FrameHeader(FrameKind.HELLO, 16).encode() + bytes(3),
    ],
)
def test_connection_without_hello_is_rejected(received: bytes) -> None:
    error = meet(received, lambda sock: handshakes.accept(sock, INCOMING, in_the_clear(b"W" * 16)))
    assert isinstance(error, HandshakeError | ProtocolError)


def test_connection_with_own_worker_id_is_rejected() -> None:
    hello = FrameHeader(FrameKind.HELLO, 16).encode() + b"W" * 16
    error = meet(hello, lambda sock: handshakes.accept(sock, INCOMING, in_the_clear(b"W" * 16)))
    assert isinstance(error, HandshakeError)
    assert "claims to be this worker" in error.message


def test_invalid_address_raises_transport_error() -> None:
    for address in ("a" * 70, "no\0where", "..", "x.y\ud800"):
        steps = handshakes.dial(address, 1, b"X" * 16, 0, in_the_clear(b"W" * 16), lambda: True)
        with pytest.raises((BarnraiseError, OSError)):
            list(steps)


def test_rejection_is_preceded_by_protocol_answer() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        steps = handshakes.accept(ours, INCOMING, in_the_clear(b"W" * 16))
        next(steps)
        assert theirs.recv(100)[:8] == encode_answer(1, plaintext=True)
        steps.close()
        assert ours.fileno() == -1
