"""Interface of a link: frames in, frames out, never blocking.

``FrameReader`` and ``FrameWriter`` hold all of the framing without a socket. So every implementation (TLS,
plaintext, in memory) shares them, and a fuzzer can feed them bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from barnraise.core.errors import ProtocolError
from barnraise.transport.links.frames import (
    BULK,
    HEADER_BYTES,
    MAX_CONTROL,
    FrameHeader,
    FrameKind,
    parse_header,
)

_RECEIVE_BUFFER = 64 << 10
_JOIN_BYTES = 16 << 10  # one TLS record: small frames leave together
assert _RECEIVE_BUFFER >= HEADER_BYTES + MAX_CONTROL


class FrameHandler(Protocol):
    """Callbacks of a link to its owner."""

    def target(self, link: Link, header: FrameHeader) -> memoryview | None:
        """Return the memory for a bulk frame's payload (exactly ``length`` bytes), or None to discard it."""

    def frame(self, link: Link, header: FrameHeader, payload: memoryview) -> None:
        """Handle a complete frame; ``payload`` is valid only during the call."""

    def sent(self, link: Link, token: object) -> None:
        """Note that the frame with this token was given to the network."""


class FrameReader:
    """Parser that cuts a byte stream into frames and reads bulk payloads straight into the owner's memory."""

    def __init__(self, link: Link, handler: FrameHandler) -> None:
        self._link = link
        self._handler = handler
        self._buffer = memoryview(bytearray(_RECEIVE_BUFFER))
        self._start = 0
        self._end = 0
        self._header: FrameHeader | None = None
        self._payload: memoryview | None = None
        self._filled = 0
        self._skipping = 0

    def space(self) -> memoryview:
        """Return the memory for the next bytes; at least one byte long."""
        if self._payload is not None:
            return self._payload[self._filled :]
        if self._skipping:
            return self._buffer[: min(self._skipping, _RECEIVE_BUFFER)]
        if self._start:
            left = self._end - self._start
            self._buffer[:left] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, left
        return self._buffer[self._end :]

    @property
    def missing(self) -> int:
        """Return the bytes still to come of the current payload."""
        return 0 if self._payload is None else len(self._payload) - self._filled

    @property
    def in_payload(self) -> bool:
        """Return True if ``space()`` is the owner's memory."""
        return self._payload is not None

    def advance(self, count: int) -> None:
        """Process ``count`` bytes that were written to ``space()``."""
        if self._payload is not None:
            self._filled += count
            self._finish_payload()
        elif self._skipping:
            self._skipping -= count
        else:
            self._end += count
            self._parse()

    def divert(self, group: int) -> None:
        """Stop writing to the owner's memory of this group; the rest of a payload goes elsewhere."""
        if self._payload is not None and self._header is not None and self._header.group == group:
            self._payload = memoryview(bytearray(self._header.length))

    def _finish_payload(self) -> None:
        header, payload = self._header, self._payload
        assert header is not None
        assert payload is not None
        if self._filled == header.length:
            self._payload = None
            self._handler.frame(self._link, header, payload)

    def _parse(self) -> None:
        while self._end - self._start >= HEADER_BYTES and self._payload is None:
            header = parse_header(self._buffer, self._start)
            body = self._start + HEADER_BYTES
            available = self._end - body
            if header.kind not in BULK:
                if available < header.length:
                    return
                self._start = body + header.length
                self._handler.frame(self._link, header, self._buffer[body : self._start])
                continue
            if header.length == 0:
                self._start = body
                self._handler.frame(self._link, header, self._buffer[body:body])
                continue
            target = self._handler.target(self._link, header)
            taken = min(available, header.length)
            self._start = body + taken
            if target is None:
                self._skipping = header.length - taken
                if self._skipping:
                    self._start = self._end = 0
                    return
                continue
            if len(target) != header.length:
                raise ProtocolError(
                    f"{header.kind.name} frame of {header.length} bytes does not fit its place"
                )
            target[:taken] = self._buffer[body : self._start]
            self._header, self._payload, self._filled = header, target, taken
            self._finish_payload()
        if self._start == self._end:
            self._start = self._end = 0


@dataclass(slots=True)
class _Outgoing:
    header: FrameHeader
    payload: memoryview
    token: object


class FrameWriter:
    """Send queue: control frames go between bulk frames, and small frames are joined."""

    def __init__(self, link: Link, handler: FrameHandler) -> None:
        self._link = link
        self._handler = handler
        self._control: deque[bytes] = deque()
        self._bulk: deque[_Outgoing] = deque()
        self._views: list[memoryview] = []
        self._tokens: list[object] = []
        self._current_group = 0
        self.queued_bytes = 0
        self.control_bytes = 0

    def control(self, header: FrameHeader, payload: bytes = b"") -> None:
        frame = header._replace(length=len(payload)).encode() + payload
        self._control.append(frame)
        self.control_bytes += len(frame)

    def bulk(self, header: FrameHeader, payload: memoryview, token: object) -> None:
        self._bulk.append(_Outgoing(header._replace(length=len(payload)), payload, token))
        self.queued_bytes += len(payload)

    @property
    def pending(self) -> bool:
        return bool(self._views or self._control or self._bulk)

    def chunks(self) -> list[memoryview]:
        """Return what to write next, in order; empty if there is nothing."""
        if not self._views:
            self._load()
        return self._views

    def advance(self, count: int) -> None:
        """Remove the first ``count`` bytes of ``chunks()``, which were sent."""
        while count:
            head = self._views[0]
            if count < len(head):
                self._views[0] = head[count:]
                return
            count -= len(head)
            del self._views[0]
        if not self._views and self._tokens:
            tokens, self._tokens = self._tokens, []
            for token in tokens:
                self._handler.sent(self._link, token)

    def forget(self, group: int) -> None:
        """Drop what is queued for a group; finish a frame that was started from a private copy."""
        kept = deque(out for out in self._bulk if out.header.group != group)
        self.queued_bytes -= sum(len(out.payload) for out in self._bulk if out.header.group == group)
        self._bulk = kept
        if self._views and self._current_group == group:
            self._views = [memoryview(bytes(view)) for view in self._views]
            self._tokens = []

    def _load(self) -> None:
        joined = bytearray()
        while self._control and len(joined) + len(self._control[0]) <= _JOIN_BYTES:
            joined += self._control.popleft()
        if not joined and self._control:
            joined += self._control.popleft()
        self.control_bytes -= len(joined)
        while self._bulk and len(joined) + HEADER_BYTES + len(self._bulk[0].payload) <= _JOIN_BYTES:
            out = self._take()
            joined += out.header.encode()
            joined += out.payload
        if joined:
            self._views = [memoryview(joined)]
            self._current_group = 0  # a private copy already
        elif self._bulk:
            out = self._take()
            self._views = [memoryview(out.header.encode()), out.payload]
            self._current_group = out.header.group

    def _take(self) -> _Outgoing:
        out = self._bulk.popleft()
        self.queued_bytes -= len(out.payload)
        self._tokens.append(out.token)
        return out


class Link(ABC):
    """Ordered duplex stream of frames to one peer worker."""

    def __init__(self, handler: FrameHandler) -> None:
        self.reader = FrameReader(self, handler)
        self.writer = FrameWriter(self, handler)
        self.closed: str | None = None
        self.bytes_in = 0
        self.bytes_out = 0

    def send(self, header: FrameHeader, payload: bytes = b"") -> None:
        """Queue a control frame."""
        self.writer.control(header, payload)

    def send_bulk(self, header: FrameHeader, payload: memoryview, token: object) -> None:
        """Queue a payload, which is read from the given memory when it is sent; then ``sent`` is called."""
        assert header.kind in BULK
        self.writer.bulk(header, payload, token)

    def forget(self, group: int) -> None:
        """Stop reading from and writing to the memory of this group."""
        self.writer.forget(group)
        self.reader.divert(group)

    @abstractmethod
    def receive(self) -> bool:
        """Read what is there, up to a limit; return True if there may be more at once."""

    @abstractmethod
    def flush(self) -> bool:
        """Write what the network takes, up to a limit; return True if something is left to write."""

    @abstractmethod
    def close(self, why: str) -> None:
        """Close the link; ``closed`` holds the reason."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Return cipher or plaintext, and the address, for people."""


__all__ = ["FrameHandler", "FrameHeader", "FrameKind", "FrameReader", "FrameWriter", "Link"]
