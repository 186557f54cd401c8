"""Total deadline of an HTTP request. httpx's own timeouts restart with every byte."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import httpx

_OPENED = ("connect_tcp.complete", "start_tls.complete")


class RequestDeadline:
    """Deadline of the requests on one HTTP client, one after the other. A late request is cut off."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._is_over = threading.Event()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Remember the socket of each new connection. httpx calls this extension."""
        stream = info.get("return_value")
        if event.endswith(_OPENED) and stream is not None:
            self._socket = stream.get_extra_info("socket")
            if self._is_over.is_set():
                self._cut(self._is_over)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Raise httpx.ReadTimeout if the requests inside take longer than ``seconds`` in total."""
        self._is_over = is_over = threading.Event()
        timer = threading.Timer(seconds, self._cut, (is_over,))
        timer.daemon = True
        timer.start()
        try:
            yield
        except httpx.HTTPError as error:
            if is_over.is_set():
                raise httpx.ReadTimeout(f"there was no whole answer within {seconds:.0f} s") from error
            raise
        finally:
            timer.cancel()

    def _cut(self, is_over: threading.Event) -> None:
        is_over.set()
        if self._socket is not None and self._is_over is is_over:
            with contextlib.suppress(OSError):  # it is closed already
                # No TLS shutdown is needed; the reading thread wakes up.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def enforce_rate(
    parts: Iterable[bytes],
    bytes_s: float,
    reserve_s: float,
    late: Callable[[], Exception],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[bytes]:
    """Yield the parts, and raise ``late()`` if they arrive too slowly.

    Each byte earns time, up to ``reserve_s`` ahead.
    """
    until = clock() + reserve_s
    for part in parts:
        now = clock()
        if now > until:
            raise late()
        until = min(now + reserve_s, until + len(part) / bytes_s)
        yield part
