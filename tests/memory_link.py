"""Link without a network: two ends in one process, for simulations and contract tests."""

from __future__ import annotations

from barnraise.core.errors import ProtocolError
from barnraise.transport.links.link import FrameHandler, Link


class MemoryLink(Link):
    """One end of an in-process pair; bytes wait in a bounded pipe as in a socket."""

    def __init__(self, handler: FrameHandler, capacity: int) -> None:
        super().__init__(handler)
        self._capacity = capacity
        self._inbox = bytearray()
        self._peer: MemoryLink | None = None

    def receive(self) -> bool:
        if self.closed is not None:
            return False
        if self._inbox:
            space = self.reader.space()
            count = min(len(space), len(self._inbox))
            space[:count] = self._inbox[:count]
            del self._inbox[:count]
            self.bytes_in += count
            try:
                self.reader.advance(count)
            except ProtocolError as error:
                self.close(f"it broke the protocol: {error.message}")
                return False
            return bool(self._inbox)
        if self._peer is None:
            self.closed = "the other side closed the connection"
        return False

    def flush(self) -> bool:
        while self._peer is not None and self.writer.pending:
            view = self.writer.chunks()[0]
            count = min(len(view), self._capacity - len(self._peer._inbox))
            if count <= 0 and len(view):
                break
            self._peer._inbox += view[:count]
            self.bytes_out += count
            self.writer.advance(count)
        return self.closed is None and self.writer.pending

    def close(self, why: str) -> None:
        if self.closed is None:
            self.closed = why
        if self._peer is not None:
            self._peer._peer = None
            self._peer = None

    @property
    def description(self) -> str:
        return "in memory"


def memory_pair(
    left: FrameHandler, right: FrameHandler, capacity: int = 256 << 10
) -> tuple[MemoryLink, MemoryLink]:
    """Return two connected ends."""
    first, second = MemoryLink(left, capacity), MemoryLink(right, capacity)
    first._peer, second._peer = second, first
    return first, second
