"""Link over a TCP socket, with TLS, or in the clear where the user declares a trusted network."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
from collections.abc import Callable

from barnraise.core.errors import ProtocolError
from barnraise.transport.links.frames import FrameHeader
from barnraise.transport.links.link import FrameHandler, Link
from barnraise.transport.links.parallel_streams import ParallelStream

_BUDGET = 2 << 20  # bytes one link may move before the others get their turn
_WAKE_BYTES = 128 << 10  # inside a large payload the loop is woken for this much, not for every packet
_RECORD_BYTES = 17 << 10  # so much of a payload may wait inside TLS, unseen by the socket
_LANE_BYTES = 64 << 10  # smaller frames are not worth a thread's wake-up
_TCP_INFO_BYTES = 256
_UNSENT_LEAST = 256 << 10  # keep queues with us, where control frames can pass,
_UNSENT_MOST = 4 << 20
_UNSENT_S = 0.02  # but let the kernel hold what it sends while this process waits for a busy core


def tune(sock: socket.socket, silence_s: float) -> None:
    """Disable Nagle, set keepalive and user timeout, and keep the kernel's unsent queue short."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": max(1, int(silence_s)),
        "TCP_KEEPALIVE": max(1, int(silence_s)),  # macOS's name for the idle time
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(silence_s * 2000),
        "TCP_NOTSENT_LOWAT": _UNSENT_LEAST,
    }
    for name, value in options.items():
        _set(sock, name, value)


def _set(sock: socket.socket, name: str, value: int) -> None:
    option = getattr(socket, name, None)
    if option is None and name == "TCP_NOTSENT_LOWAT":
        option = {"linux": 25, "darwin": 0x201}.get(sys.platform)
    if option is not None:
        with contextlib.suppress(OSError):  # an option this system lacks only costs comfort
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class StreamLink(Link):
    """Frames over one connected, non-blocking, already authenticated socket."""

    def __init__(self, sock: socket.socket, handler: FrameHandler) -> None:
        super().__init__(handler)
        self._socket = sock
        self._read = _reader(sock)
        self._one_by_one = isinstance(sock, ssl.SSLSocket) or sys.platform == "win32"
        address = sock.getpeername()
        self.address = str(address[0]) if isinstance(address, tuple) else "local"
        self.lanes: list[ParallelStream] = []
        self.sends_on_lanes = True
        self._wake_bytes = 1
        self._unsent_bytes = _UNSENT_LEAST

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def total_bytes_out(self) -> int:
        """Return the bytes sent on this link and its parallel streams."""
        return self.bytes_out + sum(lane.bytes_out for lane in self.lanes)

    def tcp_info(self) -> bytes:
        """Return what Linux tells of the connection (struct tcp_info). Raise OSError if it tells nothing."""
        if sys.platform != "linux":
            raise OSError("only Linux tells it")
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)

    def send_bulk(self, header: FrameHeader, payload: memoryview, token: object) -> None:
        lanes = self.lanes if self.sends_on_lanes else []
        lane = min(lanes, key=lambda lane: lane.queued_bytes, default=None)
        if lane is None or len(payload) < _LANE_BYTES or lane.queued_bytes > self.writer.queued_bytes:
            super().send_bulk(header, payload, token)
        else:
            lane.send(header, payload, token)

    def forget(self, group: int) -> None:
        super().forget(group)
        for lane in self.lanes:
            lane.forget(group)

    def receive(self) -> bool:
        more = self._receive()
        if self.closed is None:
            self._set_wake()
        return more

    def _set_wake(self) -> None:
        """Set the wake-up threshold: waking for each packet of a large payload costs more than the packet."""
        if sys.platform != "linux":
            return  # only Linux enlarges the receive buffer, which otherwise may never hold so much
        wanted = max(1, min(_WAKE_BYTES, self.reader.missing - _RECORD_BYTES))
        if wanted != self._wake_bytes:
            self._wake_bytes = wanted
            with contextlib.suppress(OSError):  # a kernel that cannot only wakes the loop more often
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def expect_rate(self, seconds_per_byte: float) -> None:
        """Set how much the kernel may hold unsent, by the expected rate of the link."""
        wanted = int(min(_UNSENT_MOST, max(_UNSENT_LEAST, _UNSENT_S / seconds_per_byte)))
        if wanted != self._unsent_bytes:
            self._unsent_bytes = wanted
            _set(self._socket, "TCP_NOTSENT_LOWAT", wanted)

    @property
    def sleeps_through(self) -> bool:
        """Return True if waiting bytes may not wake the loop, so that it must poll for signs of life."""
        return self._wake_bytes > 1

    def _receive(self) -> bool:
        budget = _BUDGET
        reader, read = self.reader, self._read
        try:
            while budget > 0 and self.closed is None:
                space = reader.space()
                size = len(space)
                count = filled = read(size, space)
                try:
                    # TLS hands over 16 KiB at a time: fill the payload before looking at it again
                    while filled < size and count and reader.in_payload:
                        count = read(size - filled, space[filled:])
                        filled += count
                finally:
                    self.bytes_in += filled
                    reader.advance(filled)
                if count == 0:
                    self.close("the other side closed the connection")
                    return False
                budget -= filled
                if filled < size and not reader.in_payload:
                    return False  # all there was: asking again would only cost an exception
            return self.closed is None
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except ProtocolError as error:
            self.close(f"it broke the protocol: {error.message}")
        except OSError as error:
            self.close(_reason(error))
        return False

    def flush(self, budget: int = _BUDGET) -> bool:
        """Send what waits, at most about ``budget`` bytes; return True if some is left."""
        writer, sock = self.writer, self._socket
        try:
            while budget > 0 and self.closed is None:
                views = writer.chunks()
                if not views:
                    return False
                if sys.platform != "win32" and not self._one_by_one:
                    sent = sock.sendmsg(views)
                    self._left(sent)
                else:
                    # Not less than a record: TLS does not retry a write with fewer bytes.
                    sent = self._send_records(views[0][: max(budget, _RECORD_BYTES)])
                budget -= sent
            return self.closed is None and writer.pending
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return True
        except OSError as error:
            self.close(_reason(error))
        return False

    def _send_records(self, view: memoryview) -> int:
        """Send one view in as many TLS records as needed, and count those that were sent."""
        sent = 0
        try:
            while sent < len(view):
                sent += self._socket.send(view[sent:] if sent else view)
        finally:
            if sent:
                self._left(sent)
        return sent

    def _left(self, count: int) -> None:
        self.bytes_out += count
        self.writer.advance(count)

    def close(self, why: str) -> None:
        if self.closed is None:
            self.closed = why
            with contextlib.suppress(OSError):
                self._socket.close()
            for lane in self.lanes:
                lane.close()

    @property
    def description(self) -> str:
        if isinstance(self._socket, ssl.SSLSocket):
            cipher = self._socket.cipher()
            how = cipher[0] if cipher else "TLS"
        else:
            how = "PLAINTEXT"
        streams = f", {len(self.lanes) + 1} streams" if self.lanes else ""
        return f"{how} to {self.address}{streams}"


def _reader(sock: socket.socket) -> Callable[[int, memoryview], int]:
    """Return the fastest function that reads into memory.

    SSLSocket's own method wraps each 16 KiB record in three Python calls, a fifth of all time on a fast link.
    The object inside it does not.
    """
    inner = getattr(sock, "_sslobj", None)
    if inner is not None:
        read: Callable[[int, memoryview], int] = inner.read
        return read
    return lambda size, space: sock.recv_into(space, size)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLZeroReturnError | ssl.SSLEOFError):
        return "the other side closed the connection"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "its connection was reset"
    if isinstance(error, TimeoutError):
        return "the network stopped delivering to it"
    return error.strerror or str(error)
