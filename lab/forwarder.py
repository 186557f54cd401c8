"""A switch in user space that delays and loses packets, because this kernel may have no netem.

Started as a process of its own: `forwarder.py CONDITIONS`. It reads one JSON question per line on stdin. It
answers "ok", with the bytes that lines between sites have carried.

Its ports are TAP devices. They carry whole TCP super-segments of up to 64 KiB with their offload header
untouched. A gigabit is then some thousand frames a second, which Python can do. Loss still falls on single
wire packets: a super-segment that loses some is split around them. Standard library only.
"""

import heapq
import itertools
import json
import math
import os
import random
import select
import struct
import sys
import time
from dataclasses import dataclass, field

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFO, _OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
_OFFLOAD_CHECKSUM, _OFFLOAD_TCP4 = 0x01, 0x02
# Flags, kind of segmentation, header length, segment size, where the checksum starts and lies in it.
_OFFLOAD = struct.Struct("<BBHHHH")
_ETHERNET, _LARGEST, _BATCH = 14, 65536 + 64, 64
_FIN_PUSH, _CWR = 0x09, 0x80
_HEADERS = 14 + 20 + 32  # Ethernet, IP, TCP with timestamps
_QUEUE_S = 0.2  # as home routers have, or more


def _folded(data: bytes) -> int:
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def segments_in(frame: bytes) -> int:
    """Return the number of packets that a frame is on the wire."""
    size: int
    _, kind, _, size, start, _ = _OFFLOAD.unpack_from(frame)
    if kind == 0 or size == 0:
        return 1
    base = _OFFLOAD.size + start
    payload = len(frame) - base - (frame[base + 12] >> 4) * 4
    return 1 if payload <= size else -(-payload // size)


def piece(frame: bytes, first: int, count: int) -> bytes:
    """Cut the packets first .. first+count-1 of a TCP super-segment out as a frame of their own."""
    flags, kind, hint, size, start, offset = _OFFLOAD.unpack_from(frame)
    network = _OFFLOAD.size + _ETHERNET
    transport = _OFFLOAD.size + start
    data = transport + (frame[transport + 12] >> 4) * 4
    payload = frame[data + first * size : data + (first + count) * size]
    last = data + (first + count) * size >= len(frame)
    head = bytearray(frame[:data])
    if len(payload) <= size:
        kind = size_left = 0
    else:
        size_left = size
    _OFFLOAD.pack_into(head, 0, flags, kind, hint, size_left, start, offset)
    length = data - network + len(payload)
    identification = struct.unpack_from(">H", head, network + 4)[0] + first
    struct.pack_into(">HH", head, network + 2, length, identification & 0xFFFF)
    struct.pack_into(">H", head, network + 10, 0)
    struct.pack_into(">H", head, network + 10, 0xFFFF ^ _folded(bytes(head[network:transport])))
    sequence = struct.unpack_from(">I", head, transport + 4)[0] + first * _OFFLOAD.unpack_from(frame)[3]
    struct.pack_into(">I", head, transport + 4, sequence & 0xFFFFFFFF)
    if not last:
        head[transport + 13] &= 0xFF ^ _FIN_PUSH
    if first:
        head[transport + 13] &= 0xFF ^ _CWR
    # The kernel finishes the checksum; it wants the sum of the pseudo header there.
    pseudo = bytes(head[network + 12 : network + 20]) + struct.pack(">HH", 6, length - (transport - network))
    struct.pack_into(">H", head, transport + offset, _folded(pseudo))
    return bytes(head) + payload


@dataclass
class Line:
    """One direction of a line that several paths share."""

    rate: float  # bits a second
    free_at: float = 0.0
    carried: int = 0  # bytes

    def passed(self, frame: bytes, now: float) -> float | None:
        """Return the time at which the frame leaves; None if the queue is full."""
        begin = max(now, self.free_at)
        if begin - now > _QUEUE_S:
            return None
        # Each packet of a super-segment has headers of its own, and a preamble, checksum and gap.
        size = len(frame) - _OFFLOAD.size + (segments_in(frame) - 1) * _HEADERS
        self.carried += size
        self.free_at = begin + size * 8 / self.rate
        return self.free_at


@dataclass
class Path:
    """One way between two ports. `until_loss` counts packets, so most frames cost one subtraction."""

    delay: float
    jitter: float
    loss: float
    line: Line | None = None
    last_due: float = 0.0
    until_loss: int = field(init=False)

    @classmethod
    def of(cls, conditions: dict[str, float], line: Line | None = None) -> "Path":
        return cls(conditions["delay"], conditions["jitter"], conditions["loss"], line)

    def __post_init__(self) -> None:
        self.until_loss = self._next_loss()

    def _next_loss(self) -> int:
        """Return the number of packets that pass before the next lost one."""
        if self.loss <= 0:
            return sys.maxsize
        if self.loss >= 1:
            return 0
        return int(math.log(1.0 - random.random()) / math.log(1.0 - self.loss))

    def survivors(self, frame: bytes) -> list[bytes]:
        """Return the frame, or what is left of it."""
        count = segments_in(frame)
        if self.until_loss >= count:
            self.until_loss -= count
            return [frame]
        kept, position = [], 0
        while self.until_loss < count - position:
            if self.until_loss:
                kept.append(piece(frame, position, self.until_loss))
            position += self.until_loss + 1
            self.until_loss = self._next_loss()
        if rest := count - position:
            kept.append(piece(frame, position, rest))
            self.until_loss -= rest
        return kept

    def due(self, now: float) -> float:
        due = now + self.delay
        if self.jitter:
            # A line's queue delays packets unevenly but does not let them overtake each other.
            due = max(self.last_due, now, due + random.uniform(-self.jitter, self.jitter))
            self.last_due = due
        return due


class Switch:
    """Ports, learned addresses, and frames waiting for their time."""

    def __init__(self, conditions: dict[str, float]) -> None:
        self._conditions = conditions
        self._ports: dict[int, int] = {}
        self._paths: dict[tuple[int, int], Path] = {}
        self._homes: dict[bytes, int] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._accepted = 0
        self._lines: list[Line] = []

    def answer(self, question: dict[str, object]) -> int:
        """Apply a question, and return the bytes that all lines have carried."""
        port, ends, sides = question.get("port"), question.get("path"), question.get("trunk")
        if isinstance(port, int):
            self._add_port(port)
        elif isinstance(ends, list):
            first, second = (fd for fd, number in self._ports.items() if number in ends)
            conditions = question["conditions"]
            assert isinstance(conditions, dict)
            self._paths[first, second] = Path.of(conditions)
            self._paths[second, first] = Path.of(conditions)
        elif isinstance(sides, list):
            rate, conditions = question["rate"], question["conditions"]
            assert isinstance(rate, int)
            assert isinstance(conditions, dict)
            near, far = ([fd for fd, number in self._ports.items() if number in side] for side in sides)
            for sources, targets in ((near, far), (far, near)):
                self._lines.append(Line(rate))
                for pair in itertools.product(sources, targets):
                    self._paths[pair] = Path.of(conditions, self._lines[-1])
        return sum(line.carried for line in self._lines)

    def _add_port(self, number: int) -> None:
        import fcntl

        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        mode = _TAP | _NO_PACKET_INFO | _OFFLOAD_HEADER
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", f"t{number}".encode(), mode))
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | _OFFLOAD_TCP4)
        for other in self._ports:
            self._paths[fd, other] = Path.of(self._conditions)
            self._paths[other, fd] = Path.of(self._conditions)
        self._ports[fd] = number

    def take_in(self, fd: int) -> None:
        """Read the waiting frames of a port, at most a batch, so that no port starves the others."""
        now = time.monotonic()
        for _ in range(_BATCH):
            try:
                frame = os.read(fd, _LARGEST)
            except BlockingIOError:
                return
            target, source = frame[10:16], frame[16:22]
            if self._homes.get(source) != fd:
                self._homes[source] = fd
            home = None if target[0] & 1 else self._homes.get(target)
            for other in self._ports if home is None else (home,):
                if other != fd:
                    self._accept(self._paths[fd, other], other, frame, now)

    def _accept(self, path: Path, target: int, frame: bytes, now: float) -> None:
        passed = now if path.line is None else path.line.passed(frame, now)
        if passed is None:
            return
        due = path.due(passed)
        for kept in path.survivors(frame) if path.loss else (frame,):
            self._accepted += 1
            heapq.heappush(self._waiting, (due, self._accepted, target, kept))

    def send_due(self) -> float | None:
        """Send all due frames. Return the seconds until the next one, None if none waits."""
        waiting = self._waiting
        while waiting:
            early = waiting[0][0] - time.monotonic()
            if early > 0:
                return early
            _, _, target, frame = heapq.heappop(waiting)
            try:
                os.write(target, frame)
            except OSError:
                # The port is not up yet, or the host sent what its own kernel would not take back.
                continue
        return None

    def serve(self) -> None:
        unread = b""
        while True:
            ready, _, _ = select.select([0, *self._ports], [], [], self.send_due())
            for fd in ready:
                if fd:
                    self.take_in(fd)
                    continue
                arrived = os.read(0, 65536)
                if not arrived:
                    return
                *questions, unread = (unread + arrived).split(b"\n")
                for question in questions:
                    os.write(1, b"ok %d\n" % self.answer(json.loads(question)))


if __name__ == "__main__":
    # Frames must leave on time however busy the hosts keep the machine.
    os.nice(-15)
    Switch(json.loads(sys.argv[1])).serve()
