"""Link without a network: two ends in one process, each way with a delay of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from barnraise.core.errors import ProtocolError
from barnraise.transport.links.link import FrameHandler, Link

CAPACITY = 256 << 10
_NO_DELAYS = (0.0, 0.0)


class MemoryLink(Link):
    """One end of an in-process pair; bytes wait in a bounded pipe as in a socket.

    ``delay_s``: time that each byte from this end is on its way. ``now``: clock of both ends.
    """

    def __init__(
        self,
        handler: FrameHandler,
        capacity: int = CAPACITY,
        delay_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(handler)
        self._capacity = capacity
        self._delay_s = delay_s
        self._now = now
        self._inbox: deque[tuple[float, memoryview]] = deque()
        self._inbox_bytes = 0
        self._peer: MemoryLink | None = None
        self._ends_at: float | None = None  # when the end of the connection arrives here

    @property
    def next_event_at(self) -> float | None:
        """Return the time from which `receive` has something to do, or None if nothing is on its way."""
        if self.closed is not None:
            return None
        return self._inbox[0][0] if self._inbox else self._ends_at

    @property
    def is_readable(self) -> bool:
        """Return True if `receive` has something to do now."""
        at = self.next_event_at
        return at is not None and at <= self._now()

    def arrive(self, data: bytes) -> None:
        """Let bytes arrive here now, as if the other end had sent them. They need not be frames."""
        self._inbox.append((self._now(), memoryview(data)))
        self._inbox_bytes += len(data)

    def receive(self) -> bool:
        if not self.is_readable:
            return False
        if not self._inbox:
            self.closed = "the other side closed the connection"
            return False
        count = self._read_into(self.reader.space())
        self.bytes_in += count
        try:
            self.reader.advance(count)
        except ProtocolError as error:
            self.close(f"it broke the protocol: {error.message}")
            return False
        return self.is_readable

    def _read_into(self, space: memoryview) -> int:
        """Move bytes that have arrived into this memory, and return how many."""
        now, filled = self._now(), 0
        while self._inbox and self._inbox[0][0] <= now and filled < len(space):
            at, data = self._inbox.popleft()
            count = min(len(space) - filled, len(data))
            space[filled : filled + count] = data[:count]
            filled += count
            if count < len(data):
                self._inbox.appendleft((at, data[count:]))
        self._inbox_bytes -= filled
        return filled

    def flush(self) -> bool:
        while self._peer is not None and self.writer.pending:
            view = self.writer.chunks()[0]
            count = min(len(view), self._capacity - self._peer._inbox_bytes)
            if count <= 0 and len(view):
                break
            # A copy: the owner may change its memory once the bytes are sent.
            self._peer._inbox.append((self._now() + self._delay_s, memoryview(bytes(view[:count]))))
            self._peer._inbox_bytes += count
            self.bytes_out += count
            self.writer.advance(count)
        return self.closed is None and self.writer.pending

    def close(self, why: str) -> None:
        """Close this end at once, and the other one when it has read what is on its way."""
        if self.closed is None:
            self.closed = why
        if self._peer is not None:
            self._peer._ends_at = self._now() + self._delay_s
            self._peer._peer = None
            self._peer = None

    @property
    def description(self) -> str:
        return "in memory"


def memory_pair(
    left: FrameHandler,
    right: FrameHandler,
    capacity: int = CAPACITY,
    delays: tuple[float, float] = _NO_DELAYS,
    now: Callable[[], float] = time.monotonic,
) -> tuple[MemoryLink, MemoryLink]:
    """Return two connected ends. ``delays``: from left to right, and from right to left."""
    first = MemoryLink(left, capacity, delays[0], now)
    second = MemoryLink(right, capacity, delays[1], now)
    first._peer, second._peer = second, first
    return first, second
