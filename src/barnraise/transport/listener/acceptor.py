"""Acceptor of connections: reads a preface from each, within limits, and passes on valid ones.

Unknown peers cost at most a bounded number of open sockets for a few seconds. A wrong preface gets no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from typing import NamedTuple

from barnraise.core.errors import ProtocolError
from barnraise.core.flow.replay_cache import KeyCheck, ReplayCache
from barnraise.transport.addresses import show_address, source_of
from barnraise.transport.listener.pending_connections import PendingConnections
from barnraise.transport.listener.preface import (
    PREFACE_BYTES,
    ROUTE_PAIRING,
    KeyFor,
    Preface,
    parse,
)
from barnraise.transport.log_throttle import LOG_PERIOD_S

PREFACE_DEADLINE_S = 3.0
MOST_WAITING = 128
MOST_WAITING_PER_SOURCE = 32
_MOST_NAMED_SOURCES = 256
_ACCEPTS_IN_A_ROW = 64
_OUT_OF_MEANS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_S = 0.1
_MAX_NONCES = 16384
_MAX_PAIRING_NONCES = 1024

_log = logging.getLogger(__name__)


class ConnectionRefusal(NamedTuple):
    """Rejection of a peer that knows the secret: the reason, and the bytes to send."""

    why: str
    last_words: bytes = b""


# Passes a connection on, with the peer's address. The caller still owns the socket and closes it afterwards
# in any case: a receiver that keeps the connection keeps a copy.
Deliver = Callable[[Preface, socket.socket, str], ConnectionRefusal | None]


class _PendingPreface:
    """Connection whose preface is not complete yet."""

    __slots__ = ("address", "deadline", "received", "socket", "source")

    def __init__(self, connection: socket.socket, host: str, port: int) -> None:
        self.socket = connection
        self.address = show_address(host, port)
        self.source = source_of(host)
        self.received = bytearray()
        self.deadline: asyncio.TimerHandle | None = None


class ConnectionAcceptor:
    """Owner of the listening port from ``open`` to ``close``."""

    def __init__(self, port_socket: socket.socket, key_for: KeyFor, deliver: Deliver) -> None:
        self._socket = port_socket
        self._key_for = key_for
        self._deliver = deliver
        # Only prefaces with a right MAC get here, so others cannot push a nonce out. The pairing route, whose
        # secret may be public, has a cache of its own.
        self._replays = ReplayCache[bytes](_MAX_NONCES, evict_when_full=True)
        self._pairing_replays = ReplayCache[bytes](_MAX_PAIRING_NONCES, evict_when_full=True)
        self._pending = PendingConnections[_PendingPreface](
            total=MOST_WAITING, per_source=MOST_WAITING_PER_SOURCE
        )
        self._named_sources: set[str] = set()
        self._named_since = 0.0
        self._loop = asyncio.get_running_loop()
        self.delivered = 0
        self.refused = 0

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def open(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for pending in self._pending.everyone():
            self._dismiss(pending)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_IN_A_ROW):
            connection = accept_or_pause(self._loop, self._socket, self._accept)
            if connection is None:
                return
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                host, port = connection.getpeername()[:2]
            except OSError:  # it has left already
                connection.close()
                continue
            self._receive(_PendingPreface(connection, host, port))

    def _receive(self, pending: _PendingPreface) -> None:
        if self._read(pending):
            return
        while (oldest := self._pending.oldest_in_the_way(pending.source)) is not None:
            # Its preface may have come since we last looked: then it is not the one to turn away.
            if not self._read(oldest):
                self._dismiss(oldest, "too many connections wait without a preface")
        self._pending.enter(pending, pending.source)
        self._loop.add_reader(pending.socket, self._read, pending)
        late = "no preface in time"
        pending.deadline = self._loop.call_later(PREFACE_DEADLINE_S, self._dismiss, pending, late)

    def _read(self, pending: _PendingPreface) -> bool:
        """Read what has come; return True once the connection is accepted or rejected."""
        try:
            # Never a byte more: what follows the preface belongs to its target.
            data = pending.socket.recv(PREFACE_BYTES - len(pending.received))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._dismiss(pending)
            return True
        pending.received += data
        if len(pending.received) < PREFACE_BYTES:
            return False
        try:
            preface = parse(bytes(pending.received), self._key_for)
            replays = self._pairing_replays if preface.route == ROUTE_PAIRING else self._replays
            if replays.add(preface.nonce) is not KeyCheck.NEW:
                raise ProtocolError("the preface is a replay")
        except ProtocolError as error:
            self._dismiss(pending, error.message)
            return True
        self._enter(pending, preface)
        return True

    def _enter(self, pending: _PendingPreface, preface: Preface) -> None:
        try:
            refusal = self._deliver(preface, pending.socket, pending.address)
        except BaseException:
            self._release(pending)
            raise
        if refusal is None:
            self.delivered += 1
            self._release(pending)
            return
        if refusal.last_words:
            with contextlib.suppress(OSError):
                pending.socket.send(refusal.last_words)
        self._dismiss(pending, refusal.why)

    def _dismiss(self, pending: _PendingPreface, why: str | None = None) -> None:
        if why is not None:
            self.refused += 1
            self._complain(pending.source, why)
        self._release(pending)

    def _release(self, pending: _PendingPreface) -> None:
        if pending in self._pending:
            self._pending.leave(pending)
            self._loop.remove_reader(pending.socket)
        if pending.deadline is not None:
            pending.deadline.cancel()
        pending.socket.close()

    def _complain(self, source: str, why: str) -> None:
        """Log a failure once per source and hour, with a limit on the sources."""
        if self._loop.time() - self._named_since >= LOG_PERIOD_S:
            self._named_sources.clear()
            self._named_since = self._loop.time()
        if source in self._named_sources or len(self._named_sources) >= _MOST_NAMED_SOURCES:
            return
        self._named_sources.add(source)
        _log.warning("rejected %s: %s (logged once an hour for this source)", source, why)
        if len(self._named_sources) == _MOST_NAMED_SOURCES:
            _log.warning("for an hour, further sources are rejected without a line here")


def accept_or_pause(
    loop: asyncio.AbstractEventLoop, door: socket.socket, again: Callable[[], None]
) -> socket.socket | None:
    """Accept one connection without blocking; return None if there is none or no free descriptor."""
    while True:
        try:
            connection, _ = door.accept()
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            if error.errno not in _OUT_OF_MEANS:  # it left before we got to it
                continue
            loop.remove_reader(door)
            loop.call_later(_PAUSE_S, _resume, loop, door, again)
            _log.warning("cannot accept connections for a moment: %s", error.strerror)
            return None
        connection.setblocking(False)
        return connection


def _resume(loop: asyncio.AbstractEventLoop, door: socket.socket, again: Callable[[], None]) -> None:
    if door.fileno() >= 0:
        loop.add_reader(door, again)
