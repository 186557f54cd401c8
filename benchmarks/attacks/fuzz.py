"""Feed every parser that another machine can reach with malformed bytes.

    python -m benchmarks.attacks.fuzz --quick          about 20,000 cases
    python -m benchmarks.attacks.fuzz                  1,000,000 cases
    python -m benchmarks.attacks.fuzz --target engine --seed 17 --cases 400

A case passes when the bytes are accepted or rejected with a Barnraise error. Any other exception stops the
run and reports the target and seed that reproduce it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import socket
import sys
import time
from collections.abc import Callable, Iterator
from random import Random

import msgspec
import psutil

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.comm_process.decode import decode_peer
from barnraise.collectives.comm_process.group import JoinBody
from barnraise.collectives.comm_process.links.handshakes import HandshakeSecurity, SocketWait, Steps, accept
from barnraise.collectives.messages import Failure, OperationSpec, encode_specification
from barnraise.core.errors import BarnraiseError, IdentityError, ProtocolError
from barnraise.identity import NodeKey, delegate, read_worker
from barnraise.transport.ipc.messages import IncomingConnection
from barnraise.transport.links.frames import BULK, HEADER_BYTES, FrameHeader, FrameKind, parse_header
from barnraise.transport.listener import preface
from benchmarks.attacks.hostile_peer import Session, mutated
from benchmarks.report import environment_line, last_line, table
from tests.memory_link import MemoryLink

_GROUP = 100  # cases per seed
_SECRET = bytes(range(32))


def header_cases(random: Random) -> None:
    good = FrameHeader(random.choice(list(FrameKind)), 100, 1, 2, 3, 4).encode()
    for _ in range(_GROUP):
        data = mutated(random, good) if random.random() < 0.5 else random.randbytes(HEADER_BYTES)
        with contextlib.suppress(ProtocolError):
            header = parse_header(data.ljust(HEADER_BYTES, b"\0"))
            assert header.length <= 1 << 20


class _Taker:
    def target(self, link: object, header: FrameHeader) -> memoryview | None:
        return None if header.first % 2 else memoryview(bytearray(header.length))

    def frame(self, link: object, header: FrameHeader, payload: memoryview) -> None:
        assert len(payload) == header.length

    def sent(self, link: object, token: object) -> None: ...


def reader_cases(random: Random) -> None:
    """Feed streams of frames with a few changed bytes, cut at random places."""
    for _ in range(_GROUP // 10):
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


def body_cases(random: Random) -> None:
    bodies: list[tuple[type[msgspec.Struct], bytes]] = [
        (JoinBody, msgspec.msgpack.encode(JoinBody(1, "group", 0, 4, bytes(16)))),
        (Failure, msgspec.msgpack.encode(Failure("peer-lost", "why", 2, (1, 2)))),
        (CostTable, msgspec.msgpack.encode(CostTable.default())),
        (
            OperationSpec,
            encode_specification(OperationSpec("all_reduce", 1, "sum", -1, "ring", (9,), 64, 2)),
        ),
    ]
    for _ in range(_GROUP):
        kind, good = random.choice(bodies)
        data = mutated(random, good) if random.random() < 0.9 else random.randbytes(random.randrange(60))
        with contextlib.suppress(ProtocolError):
            decode_peer(data, kind)


def preface_cases(random: Random) -> None:
    good = preface.encode(preface.Preface(bytes(16), random.randbytes(16)), _SECRET)
    for _ in range(_GROUP // 2):
        with contextlib.suppress(ProtocolError):
            preface.parse(mutated(random, good), lambda route, target: _SECRET)
        with contextlib.suppress(ProtocolError):
            preface.parse_answer(mutated(random, preface.encode_answer(1)))


_NODE = NodeKey.generate()
_CREDENTIALS = delegate(_NODE, run="run", worker=b"W" * 16)


def certificate_cases(random: Random) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    good = x509.load_pem_x509_certificate(_CREDENTIALS.certificate_pem).public_bytes(Encoding.DER)
    for _ in range(_GROUP):
        with contextlib.suppress(IdentityError):
            read_worker(mutated(random, good))


def rendezvous_cases(random: Random) -> None:
    from barnraise.collectives.messages import GroupMember
    from barnraise.collectives.rendezvous import _Entry, _read

    good = msgspec.msgpack.encode(_Entry(GroupMember(bytes(16), 52416, ("192.0.2.1",)), "fresh"))
    for _ in range(_GROUP):
        with contextlib.suppress(ProtocolError):
            _read(mutated(random, good), 0)


_SECURITIES: dict[bool, HandshakeSecurity] = {}


def handshake_cases(random: Random) -> None:
    """Run handshakes with a caller that sends anything after its preface, with and without TLS."""
    for _ in range(_GROUP // 10):
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
    for _ in range(_GROUP // 25):
        session.attack(25)


Target = Callable[[Random], None]
TARGETS: dict[str, tuple[Target, float]] = {
    "header": (header_cases, 0.25),
    "reader": (reader_cases, 0.2),
    "body": (body_cases, 0.2),
    "preface": (preface_cases, 0.1),
    "certificate": (certificate_cases, 0.08),
    "rendezvous": (rendezvous_cases, 0.1),
    "handshake": (handshake_cases, 0.02),
    "engine": (engine_cases, 0.05),
}
_COUNTS_TENTH = ("reader", "handshake")  # one seed gives a tenth of the cases there


def cases_of(name: str) -> int:
    return _GROUP // 10 if name in _COUNTS_TENTH else _GROUP


def run_target(name: str, cases: int, seed: int) -> Iterator[int]:
    """Run ``cases`` cases; yield how many are done after each seed."""
    target, done = TARGETS[name][0], 0
    while done < cases:
        try:
            target(Random(f"{name}/{seed}"))
        except BaseException as error:
            error.add_note(
                f"again: python -m benchmarks.attacks.fuzz --target {name} --seed {seed} --cases 1"
            )
            raise
        done += cases_of(name)
        seed += 1
        yield done


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="about 20,000 cases instead of a million")
    parser.add_argument("--cases", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS, default=None)
    options = parser.parse_args(arguments)
    total = options.cases or (20_000 if options.quick else 1_000_000)
    print(environment_line())
    process = psutil.Process()
    rows, figures = [], {}
    grown = 0
    for name, (_, share) in TARGETS.items():
        if options.target not in (None, name):
            continue
        cases = int(total * (share if options.target is None else 1))
        begun, done, warm = time.monotonic(), 0, 0
        for done in run_target(name, cases, options.seed):
            if not warm and done * 5 >= cases:
                gc.collect()
                warm = process.memory_info().rss
        gc.collect()
        growth = process.memory_info().rss - warm
        grown += max(0, growth)
        seconds = time.monotonic() - begun
        rows.append((name, done, f"{done / seconds:.0f}", f"{growth / 1e6:+.1f}"))
        figures[name] = done
    print(table(("target", "cases", "per second", "memory, MB"), rows))
    last_line({"fuzz_cases": sum(figures.values()), "fuzz_crashes": 0, "grown_mb": grown / 1e6, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
