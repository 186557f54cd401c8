"""JSON lines over a stream socket, between a driver and its worker processes, of tests and benchmarks."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any


class JsonSocket:
    """One end of a connection whose messages are JSON objects."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._received = b""

    @classmethod
    def dial(cls, path: str) -> JsonSocket:
        """Connect to the Unix socket of a driver."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.connect(path)
        return cls(stream)

    def send(self, message: Mapping[str, Any]) -> None:
        self._stream.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None) -> dict[str, Any] | None:
        """Return the next message, or None at the end of the stream. Raise TimeoutError if none arrives."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._received:
            self._stream.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            piece = self._stream.recv(1 << 20)
            if not piece:
                return None
            self._received += piece
        head, self._received = self._received.split(b"\n", 1)
        message: dict[str, Any] = json.loads(head)
        return message

    def close(self) -> None:
        self._stream.close()
