"""Parallel streams of a link, each encrypted by a thread of its own.

One core encrypts a few hundred MB/s; a faster link gets parallel streams. A stream carries only bulk frames.
Its thread touches nothing but its socket and the memory it was given. The loop of the link's owner decides
where bytes go; every stream reports to it through ``ParallelStreamReports``.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from collections import deque
from dataclasses import dataclass

from barnraise.core.errors import ProtocolError
from barnraise.transport.links.frames import BULK, HEADER_BYTES, FrameHeader, parse_header

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ParallelStreamReport:
    """Event of a stream: ``kind`` is arriving, arrived, sent or closed."""

    lane: ParallelStream
    kind: str
    header: FrameHeader | None = None
    payload: memoryview | None = None
    token: object = None
    why: str = ""


class ParallelStreamReports:
    """Queue from all streams to the owner's loop, which polls ``fileno``."""

    def __init__(self) -> None:
        self._reports: deque[ParallelStreamReport] = deque()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)

    def fileno(self) -> int:
        return self._bell.fileno()

    def post(self, report: ParallelStreamReport) -> None:
        self._reports.append(report)
        with contextlib.suppress(BlockingIOError, OSError):  # full: the owner wakes anyway
            self._ringer.send(b"!")

    def take(self) -> list[ParallelStreamReport]:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        taken = []
        while self._reports:
            taken.append(self._reports.popleft())
        return taken

    def close(self) -> None:
        self._bell.close()
        self._ringer.close()


class ParallelStream:
    """Extra stream with a thread that sends and one that receives."""

    def __init__(self, sock: socket.socket, reports: ParallelStreamReports) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reports = reports
        self._lock = threading.Lock()  # held during every call on the socket and while memory is exchanged
        self._outgoing: deque[tuple[FrameHeader, memoryview, object]] = deque()
        self._views: list[memoryview] = []
        self._current: tuple[FrameHeader, object] | None = None
        self._head = bytearray()
        self._incoming: FrameHeader | None = None
        self._payload: memoryview | None = None
        self._filled = 0
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self.closed = False
        self.bytes_in = 0
        self.bytes_out = 0
        self.queued_bytes = 0
        self._thread = threading.Thread(target=self._run, name="barnraise-lane", daemon=True)
        self._thread.start()

    # called by the owner

    def send(self, header: FrameHeader, payload: memoryview, token: object) -> None:
        with self._lock:
            self._outgoing.append((header._replace(length=len(payload)), payload, token))
            self.queued_bytes += len(payload)
        self._ring()

    def place(self, target: memoryview | None) -> None:
        """Set the memory for an ``arriving`` payload; None discards it."""
        with self._lock:
            assert self._incoming is not None
            self._payload = target if target is not None else memoryview(bytearray(self._incoming.length))
            self._filled = 0
        self._ring()

    def forget(self, group: int) -> None:
        """Drop what is queued for a group; what was started continues with private memory."""
        with self._lock:
            self._outgoing = deque(item for item in self._outgoing if item[0].group != group)
            self.queued_bytes = sum(len(payload) for _, payload, _ in self._outgoing)
            if self._current is not None and self._current[0].group == group:
                self._views = [memoryview(bytes(view)) for view in self._views]
                self._current = (self._current[0], None)
            if self._payload is not None and self._incoming is not None and self._incoming.group == group:
                self._payload = memoryview(bytearray(self._incoming.length))

    def close(self) -> None:
        self.closed = True
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    # the stream's own thread

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def _run(self) -> None:
        why = "closed"
        try:
            while not self.closed:
                wrote, read = self._write_some(), self._read_some()
                if not wrote and not read:
                    self._wait()
        except ProtocolError as error:
            why = f"it broke the protocol: {error.message}"
        except (OSError, ValueError) as error:
            why = str(error)
        finally:
            if not self.closed:
                self._reports.post(ParallelStreamReport(self, "closed", why=why))
            self.closed = True
            for sock in (self._socket, self._wake, self._waker):
                with contextlib.suppress(OSError):
                    sock.close()

    def _wait(self) -> None:
        events = selectors.EVENT_WRITE if self._views or self._outgoing else 0
        if self._incoming is None or self._payload is not None:
            events |= selectors.EVENT_READ
        with selectors.DefaultSelector() as selector:  # select() refuses descriptors from 1024 on
            selector.register(self._wake, selectors.EVENT_READ)
            if events:
                selector.register(self._socket, events)
            ready = [key.fileobj for key, _ in selector.select(_POLL_S)]
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)

    def _write_some(self) -> bool:
        done: tuple[FrameHeader, object] | None = None
        with self._lock:
            if not self._views and self._outgoing:
                header, payload, token = self._outgoing.popleft()
                self.queued_bytes -= len(payload)
                self._views = [memoryview(header.encode()), payload]
                self._current = (header, token)
            if not self._views:
                return False
            try:
                count = self._socket.send(self._views[0])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return False
            self.bytes_out += count
            self._views[0] = self._views[0][count:]
            while self._views and not self._views[0]:
                del self._views[0]
            if not self._views:
                done, self._current = self._current, None
        if done is not None and done[1] is not None:
            self._reports.post(ParallelStreamReport(self, "sent", token=done[1]))
        return True

    def _read_some(self) -> bool:
        arriving: FrameHeader | None = None
        arrived: tuple[FrameHeader, memoryview] | None = None
        with self._lock:
            try:
                if self._incoming is None:
                    arriving = self._read_header()
                elif self._payload is None:
                    return False  # the owner has not said yet where it goes
                else:
                    arrived = self._read_payload()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
        if arriving is not None:
            self._reports.post(ParallelStreamReport(self, "arriving", arriving))
        elif arrived is not None:
            self._reports.post(ParallelStreamReport(self, "arrived", arrived[0], arrived[1]))
        return True

    def _read_header(self) -> FrameHeader | None:
        data = self._socket.recv(HEADER_BYTES - len(self._head))
        if not data:
            raise OSError("the other side closed a lane")
        self.bytes_in += len(data)
        self._head += data
        if len(self._head) < HEADER_BYTES:
            return None
        header = parse_header(self._head)
        self._head.clear()
        if header.kind not in BULK or not header.length:
            raise ProtocolError(f"a {header.kind.name} frame on a lane")
        self._incoming = header
        return header

    def _read_payload(self) -> tuple[FrameHeader, memoryview] | None:
        assert self._incoming is not None
        assert self._payload is not None
        count = self._socket.recv_into(self._payload[self._filled :])
        if not count:
            raise OSError("the other side closed a lane")
        self.bytes_in += count
        self._filled += count
        if self._filled < self._incoming.length:
            return None
        whole = (self._incoming, self._payload)
        self._incoming, self._payload = None, None
        return whole
