"""Messages between two processes of one machine, with sockets passed along.

A frame is a header, the message and, on Windows, the shared socket. The header has the length of the message
and of the shared socket, and a flag for a socket. On Unix the descriptor is attached to the frame's first
byte. Descriptors and frames keep their order, so the n-th frame that wants one gets the n-th.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import sys
import time
from collections import deque
from typing import NamedTuple

from barnraise.core.errors import ListenerError, ProtocolError

LARGEST_MESSAGE = 1024 * 1024
_HEADER = struct.Struct("<IHBx")
_MOST_DESCRIPTORS = 16
_CHUNK = 64 * 1024


class IpcFrame(NamedTuple):
    """Message as it was sent."""

    message: bytes
    share: bytes
    has_socket: bool


class SocketDelivery(NamedTuple):
    """Message, and the socket that came with it."""

    message: bytes
    socket: socket.socket | None


class IpcFrameReader:
    """Parser that cuts a byte stream into frames. Pure."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> IpcFrame | None:
        """Return the next complete frame, or None if more bytes are needed."""
        if len(self._buffer) < _HEADER.size:
            return None
        message_length, share_length, attached = _HEADER.unpack_from(self._buffer)
        if message_length > LARGEST_MESSAGE:
            raise ProtocolError(f"a local message claims {message_length} bytes")
        if attached > 1 or (share_length and not attached):
            raise ProtocolError("a local message has a wrong form")
        middle = _HEADER.size + message_length
        end = middle + share_length
        if len(self._buffer) < end:
            return None
        frame = IpcFrame(
            bytes(self._buffer[_HEADER.size : middle]), bytes(self._buffer[middle:end]), bool(attached)
        )
        del self._buffer[:end]
        return frame


def encode_frame(message: bytes, *, share: bytes = b"", has_socket: bool = False) -> bytes:
    if len(message) > LARGEST_MESSAGE:
        raise ProtocolError(f"a local message of {len(message)} bytes is too long to send")
    return _HEADER.pack(len(message), len(share), has_socket) + message + share


class IpcChannel:
    """Local connection that carries messages and sockets, blocking or not."""

    def __init__(self, connection: socket.socket, *, takes_sockets: bool = False) -> None:
        self._connection = connection
        self._takes_sockets = takes_sockets
        self._frames = IpcFrameReader()
        self._descriptors: deque[int] = deque()
        self.closed = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def setblocking(self, blocking: bool) -> None:
        self._connection.setblocking(blocking)

    @property
    def connection(self) -> socket.socket:
        """Return the socket, to send a frame that is too large at once; send nothing else meanwhile."""
        return self._connection

    def settimeout(self, timeout_s: float) -> None:
        self._connection.settimeout(timeout_s)

    def send(self, message: bytes) -> None:
        """Send one message, whole or not at all. BlockingIOError means that the reader is behind."""
        self._send(encode_frame(message), None)

    def send_socket(self, message: bytes, passed: socket.socket, target_pid: int) -> None:
        """Send one message with a copy of a socket; the caller still has to close its own."""
        if sys.platform == "win32":
            self._send(encode_frame(message, share=passed.share(target_pid), has_socket=True), None)
        else:
            self._send(encode_frame(message, has_socket=True), passed.fileno())

    def receive(self, deadline: float | None = None) -> SocketDelivery | None:
        """Return the next message, or None if there is none yet or the channel is closed.

        ``deadline`` (monotonic) limits the whole wait on a blocking channel; TimeoutError after it.
        """
        while (frame := self._frames.next()) is None:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("no message in time")
                self._connection.settimeout(left)
            try:
                data = self._read()
            except BlockingIOError:
                return None
            if not data:
                self.closed = True
                return None
            self._frames.feed(data)
        if frame.has_socket and not self._takes_sockets:
            raise ProtocolError("a local message carried an unexpected socket")
        return SocketDelivery(frame.message, self._take_socket(frame) if frame.has_socket else None)

    def close(self) -> None:
        self.closed = True
        self._connection.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _send(self, data: bytes, descriptor: int | None) -> None:
        if sys.platform == "win32" or descriptor is None:
            sent = self._connection.send(data)
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            sent = self._connection.sendmsg([data], [rights])
        if sent == len(data):
            return
        if self._connection.gettimeout() == 0:
            # Half a frame is out and the rest cannot follow without waiting: the channel is spoilt.
            raise ListenerError("a local process does not read its messages", hint="Start that worker again.")
        self._connection.sendall(data[sent:])

    def _read(self) -> bytes:
        if sys.platform != "win32" and self._takes_sockets:
            return self._read_with_descriptors()
        # A plain receive makes the kernel close any descriptor that was attached.
        return self._connection.recv(_CHUNK)

    def _take_socket(self, frame: IpcFrame) -> socket.socket:
        try:
            if sys.platform == "win32":
                return socket.fromshare(frame.share)
            else:
                return self._take_descriptor(frame)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"a local message carried something that is not a socket: {error}") from error

    if sys.platform != "win32":

        def _read_with_descriptors(self) -> bytes:
            room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
            data, attachments, flags, _ = self._connection.recvmsg(_CHUNK, room)
            for level, kind, content in attachments:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(content[: len(content) - len(content) % received.itemsize])
                    self._descriptors.extend(received)
            if flags & socket.MSG_CTRUNC or len(self._descriptors) > _MOST_DESCRIPTORS:
                raise ProtocolError("a local process sent more sockets than messages")
            return data

        def _take_descriptor(self, frame: IpcFrame) -> socket.socket:
            if frame.share or not self._descriptors:
                raise ProtocolError("a local message came without its socket")
            descriptor = self._descriptors.popleft()
            os.set_inheritable(descriptor, False)
            try:
                return socket.socket(fileno=descriptor)
            except OSError:
                os.close(descriptor)
                raise
