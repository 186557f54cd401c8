"""A peer with a valid link that sends anything, against an engine that works with an honest one meanwhile.

Used by the fuzzer and by the tests. Everything is in memory; one seed gives one session.
"""

from __future__ import annotations

from collections import deque
from random import Random

import msgspec

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.comm_process.engine import CommEngine
from barnraise.collectives.comm_process.group import JoinBody, group_tag, membership_digest
from barnraise.collectives.comm_process.peers import Clocks
from barnraise.collectives.messages import (
    CloseGroup,
    Failure,
    GroupMember,
    GroupOpened,
    OpenGroup,
    OperationFailed,
    OperationFinished,
    OperationSpec,
    ReceiveFrom,
    Reply,
    SendTo,
    StartOperation,
    encode_specification,
)
from barnraise.testing.memory_link import memory_pair
from barnraise.transport.links.frames import BULK, MAX_CONTROL, MAX_PAYLOAD, FrameHeader, FrameKind
from benchmarks.attacks.fuzz.mutation import mutated

VICTIM, FRIEND, HOSTILE = b"V" * 16, b"F" * 16, b"H" * 16
RUN = "run"
_SIZE = 40_000
_MAX_WAITING = 4 << 20  # control frames that may wait for a peer which does not read
_EDGES = (0, 1, 2, 3, 31, 32, 33, 255, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)


class Worker:
    """One communication engine, with a minimal worker."""

    def __init__(self, name: bytes) -> None:
        self.clock = 1000.0
        self.engine = CommEngine(name, RUN, 2, Clocks(), self)
        self.opened: set[int] = set()
        self.ended: dict[int, OperationFinished | OperationFailed] = {}
        self.segments: dict[int, bytearray] = {}

    def now(self) -> float:
        return self.clock

    def now_ns(self) -> int:
        return int(self.clock * 1e9)

    def dial(self, member: GroupMember) -> None:
        """Do nothing: the session creates the links."""

    def memory(self, segment: int, offset: int, size: int) -> memoryview:
        return memoryview(self.segments[segment])[offset : offset + size]

    def reply(self, message: Reply) -> None:
        if isinstance(message, GroupOpened):
            self.opened.add(message.group)
        elif isinstance(message, OperationFinished | OperationFailed):
            assert message.operation not in self.ended, "an operation was reported twice"
            self.ended[message.operation] = message


class Sink:
    """Receiver of the hostile end, which ignores every frame."""

    def target(self, link: object, header: FrameHeader) -> memoryview | None:
        return None

    def frame(self, link: object, header: FrameHeader, payload: memoryview) -> None: ...

    def sent(self, link: object, token: object) -> None: ...


class Session:
    """A victim and its friend in one group; the victim and the hostile peer in others, one by one."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.victim, self.friend = Worker(VICTIM), Worker(FRIEND)
        self.numbers = 0
        self.bad_groups = 0
        self.bad = 0
        self.rounds = 0
        self.closed_links = 0
        self.recent: deque[bytes] = deque(maxlen=4)
        victim_link, friend_link = memory_pair(self.victim.engine, self.friend.engine)
        self.links = (victim_link, friend_link)
        self.victim.engine.link_up(FRIEND, victim_link)
        self.friend.engine.link_up(VICTIM, friend_link)
        members = (GroupMember(VICTIM, 1, ()), GroupMember(FRIEND, 1, ()))
        for rank, worker in enumerate((self.victim, self.friend)):
            command = OpenGroup(self._number(), 2, "good", rank, members, 60.0, CostTable.default())
            worker.engine.command(command)
        self.good = group_tag(RUN, 2, "good")
        self._pump()
        self._connect()

    def attack(self, frames: int) -> None:
        """Send ``frames`` hostile frames, then check that a collective of the good group gives the right
        result.
        """
        for _ in range(frames):
            self._frame()
            assert self.hostile.writer.control_bytes < _MAX_WAITING, "answers pile up"
            assert self.links[0].closed is None, f"the friend's link was closed: {self.links[0].closed}"
            if self.hostile.closed is not None:
                self.closed_links += 1
                self.victim.engine.link_down(self.hostile)
                self._connect()
            elif self.victim.engine._groups[self.bad].failure is not None:
                self._open_bad()
        self.victim.clock += 0.1
        self.friend.clock += 0.1
        self.victim.engine.tick()
        self.friend.engine.tick()
        self._good_round()

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers

    def _pump(self) -> None:
        busy = True
        while busy:
            before = sum(link.bytes_in + link.bytes_out for link in self.links)
            for link in self.links:
                link.flush()
                link.receive()
            busy = before != sum(link.bytes_in + link.bytes_out for link in self.links)

    def _good_round(self) -> None:
        size = self.random.choice((4, 400, _SIZE))
        what = OperationSpec("all_reduce", 8, "sum", -1, "ring", (size,), 16 << 10, 2)
        numbers = []
        for rank, worker in enumerate((self.victim, self.friend)):
            number = self._number()
            numbers.append(number)
            worker.segments = {number: bytearray((rank + 5).to_bytes(4, "little") * (size // 4))}
            worker.engine.command(
                StartOperation(number, self.good, self.rounds, what, number, 0, size, 600.0)
            )
        self._pump()
        self.rounds += 1
        for worker, number in zip((self.victim, self.friend), numbers, strict=True):
            assert isinstance(worker.ended.get(number), OperationFinished), worker.ended.get(number)
            assert worker.segments[number] == (11).to_bytes(4, "little") * (size // 4), "wrong sums"
            worker.ended.clear()

    # the hostile side

    def _connect(self) -> None:
        self.hostile, self.far = memory_pair(self.victim.engine, Sink(), 64 << 10)
        self.victim.engine.link_up(HOSTILE, self.hostile)
        self._open_bad()

    def _open_bad(self) -> None:
        """Open a group with the hostile peer, which joins correctly, and start operations with it."""
        self.bad_groups += 1
        name = f"bad{self.bad_groups}"
        engine = self.victim.engine
        if self.bad_groups > 1:
            engine.command(CloseGroup(self.bad))
        members = (GroupMember(VICTIM, 1, ()), GroupMember(HOSTILE, 1, ()))
        self.bad = group_tag(RUN, 2, name)
        engine.command(OpenGroup(self._number(), 2, name, 0, members, 60.0, CostTable.default()))
        body = JoinBody(2, name, 1, 2, membership_digest((VICTIM, HOSTILE)))
        self._deliver(FrameHeader(FrameKind.JOIN, group=self.bad), msgspec.msgpack.encode(body))
        self.reduce = OperationSpec("all_reduce", 8, "sum", -1, "ring", (4096,), 1024, 2)
        segments = self.victim.segments
        for sequence in range(2):
            number = self._number()
            segments[number] = bytearray(4096)
            engine.command(StartOperation(number, self.bad, sequence, self.reduce, number, 0, 4096, 600.0))
        for size in (100, _SIZE):
            send, receive = self._number(), self._number()
            segments[send], segments[receive] = bytearray(size), bytearray(size)
            engine.command(SendTo(send, self.bad, 1, 5, 8, send, 0, size, 600.0))
            engine.command(ReceiveFrom(receive, self.bad, 1, 5, 8, receive, 0, size, 600.0))

    def _frame(self) -> None:
        random = self.random
        draw = random.random()
        if draw < 0.05:
            raw = random.randbytes(random.randrange(1, 80))
        elif draw < 0.1 and self.recent:
            raw = mutated(random, random.choice(self.recent))
        else:
            header, payload = self._plausible()
            if draw < 0.2:  # a length that is not the payload's
                raw = (
                    header._replace(length=random.choice((0, 1, 2**32 - 1, MAX_PAYLOAD + 1))).encode()
                    + payload
                )
            else:
                raw = header._replace(length=len(payload)).encode() + payload
        self.recent.append(raw[:400])
        self._push(raw)

    def _plausible(self) -> tuple[FrameHeader, bytes]:
        random = self.random
        kind = random.choice(list(FrameKind))
        group = random.choice((self.bad, self.bad, self.bad, self.good, 0, random.getrandbits(64)))
        sequence = random.choice((0, 1, 2, 3, self.rounds, random.choice(_EDGES)))
        first = random.choice((0, 1, 5, random.choice(_EDGES) & 0xFFFFFFFF))
        second = random.choice((0, 1, 8, random.choice(_EDGES) & 0xFFFFFFFF))
        return FrameHeader(kind, 0, group, sequence, first, second), self._payload(kind)

    def _payload(self, kind: FrameKind) -> bytes:
        random = self.random
        bodies: dict[FrameKind, object] = {
            FrameKind.JOIN: JoinBody(random.choice((0, 1, 2, 3)), "good", random.randrange(3), 2, bytes(16)),
            FrameKind.FAIL: Failure(
                random.choice(("peer-lost", "operation-timeout", "nonsense")),
                "x" * random.choice((3, 30_000)),
                random.choice((-1, 0, 1, 2, -7)),
                tuple(random.choice(_EDGES) for _ in range(random.randrange(3))),
            ),
            FrameKind.MEASURE: CostTable.default(),
            FrameKind.TABLE: CostTable.default(),
        }
        draw = random.random()
        if draw < 0.1:
            return random.randbytes(random.randrange(64))
        if draw < 0.15:
            return b"\x91" * random.choice((100, 30_000)) + b"\xc0"
        if kind in (FrameKind.OPEN, FrameKind.TELL):
            changed = msgspec.structs.replace(
                self.reduce,
                kind=random.choice(("all_reduce", "all_reduce", "k" * random.choice((1, 30_000)))),
                dtype=random.choice((8, 8, 0, 999)),
                sizes=random.choice(((4096,), (), (2**63,) * 40)),
            )
            good = encode_specification(changed)
        elif kind in bodies:
            good = msgspec.msgpack.encode(bodies[kind])
        elif kind is FrameKind.OFFER:
            good = random.choice(_EDGES).to_bytes(8, "little")
        elif kind is FrameKind.PROBED:
            good = random.randbytes(16)
        elif kind in BULK:
            good = bytes(random.choice((0, 0, 1, 512, 1024, 2048, 4096, 16 << 10, 17_000)))
        else:
            good = b""
        good = good[:MAX_CONTROL] if kind not in BULK else good
        return good if draw < 0.8 else mutated(random, good)

    def _deliver(self, header: FrameHeader, payload: bytes) -> None:
        self._push(header._replace(length=len(payload)).encode() + payload)

    def _push(self, raw: bytes) -> None:
        """Feed bytes into the victim's link, cut at random places."""
        at = 0
        while at < len(raw) and self.hostile.closed is None:
            step = len(raw) if self.random.random() < 0.7 else self.random.randrange(1, 200)
            self.hostile.arrive(raw[at : at + step])
            at += step
            while self.hostile.is_readable:
                self.hostile.receive()
