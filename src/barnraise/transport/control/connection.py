"""Control connection between two agents: ordered messages both ways, under TLS, on an asyncio loop.

`dial_unopened` and `accept_agent` make them. Nothing here blocks, and the memory for waiting messages is
bounded.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

from barnraise.core import metrics
from barnraise.core.errors import BarnraiseError, HandshakeError, ProtocolError, TransportError
from barnraise.core.metrics import catalogue
from barnraise.identity import WorkerIdentity
from barnraise.transport.addresses import show_address
from barnraise.transport.control.agent_tls import TlsSession, explain
from barnraise.transport.control.framing import (
    ControlFrame,
    ControlFrameKind,
    ControlFrames,
    encode_control,
    encode_opening,
)
from barnraise.transport.listener.preface import (
    ROUTE_AGENT,
    ROUTE_AGENT_BULK,
    ROUTE_AGENT_SHIP,
    ROUTE_NAMES,
    Preface,
)

FLUSH_S = 0.2
_DRAIN_S = 60.0
_DRAINED = 1 << 20  # what may wait for a bulk sender to go on
_PIECE = 64 << 10  # so much is encrypted at once; a ping never waits for more than one frame
_MOST_PINGS = 64
_FRAMES_AT_ONCE = 64

_log = logging.getLogger(__name__)


class ConnectionLimits(NamedTuple):
    """Largest message, and the most bytes that may wait to be sent."""

    message: int
    queue: int


LIMITS = {
    ROUTE_AGENT: ConnectionLimits(1 << 20, 4 << 20),
    ROUTE_AGENT_BULK: ConnectionLimits(8 << 20, 32 << 20),
    ROUTE_AGENT_SHIP: ConnectionLimits(8 << 20, 64 << 20),
}

OnMessage = Callable[["ControlConnection", bytes], None]
OnClosed = Callable[["ControlConnection", str], None]


@dataclass(frozen=True)
class ConnectionOpening:
    """Versions and identities that both sides know after TLS."""

    session: TlsSession
    preface: Preface
    version: int
    peer: WorkerIdentity
    address: str
    port: int
    outbound: bool


class ControlConnection:
    """Ordered stream of messages to one incarnation of an agent.

    ``on_message`` and ``on_closed`` run on the loop. The first runs on the loop's next turn at the earliest.
    The second runs exactly once, also after our own `close`. A BarnraiseError of ``on_message`` closes the
    connection with its text.
    """

    def __init__(self, meeting: ConnectionOpening) -> None:
        self.peer = meeting.peer
        self.address = meeting.address
        self.port = meeting.port
        self.outbound = meeting.outbound
        self.route = meeting.preface.route
        self.version = meeting.version
        self.closed: str | None = None
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()  # when bytes last came, also those of half a message
        self._limits = LIMITS[self.route]
        route = ROUTE_NAMES[self.route]
        self._sent_bytes = metrics.counter(catalogue.AGENT_BYTES, route, "sent")
        self._received_bytes = metrics.counter(catalogue.AGENT_BYTES, route, "received")
        self._session = meeting.session
        self._opening = encode_opening(meeting.preface, meeting.version)
        self._frames = ControlFrames(self._limits.message)
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._urgent: deque[bytes] = deque()  # pings and pongs overtake messages, never parts of one
        self._waiting: deque[bytes] = deque()
        self._rest = memoryview(b"")
        self._waiting_bytes = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._pings: dict[bytes, tuple[float, asyncio.Future[float]]] = {}
        self._serials = itertools.count()
        self._on_message: OnMessage | None = None
        self._on_closed: OnClosed | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._held = False  # opened, but the owner does not have it yet
        self._fault: BarnraiseError | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._said_all = False

    def __str__(self) -> str:
        where = show_address(self.address, self.port)
        return f"the agent of machine {self.peer.node.short} at {where}"

    @property
    def queued(self) -> int:
        """Return the bytes given to `send` that are not yet given to the system."""
        return self._waiting_bytes + (self._transport.get_write_buffer_size() if self._transport else 0)

    def send(self, message: bytes) -> None:
        """Queue a message; drop it if the connection is closed. A peer that is too far behind is closed."""
        if len(message) > self._limits.message:
            raise ProtocolError(
                f"a message of {len(message)} bytes is too long for its link, at most {self._limits.message}",
                hint="Send it in parts, on the bulk route.",
            )
        self._queue(self._waiting, encode_control(ControlFrameKind.MESSAGE, message))

    async def drain(self, timeout_s: float = _DRAIN_S) -> None:
        """Wait until the queue is short enough.

        Raise TransportError if the connection closes or the wait times out.
        """
        try:
            await asyncio.wait_for(self._drained.wait(), timeout_s)
        except TimeoutError as error:
            raise TransportError(f"{self} did not read enough within {timeout_s:g} s") from error
        if self.closed is not None:
            raise self._gone()

    async def ping(self, timeout_s: float) -> float:
        """Return the seconds until the other side's loop has answered.

        Raise TransportError if it does not answer in time.
        """
        if self.closed is not None:
            raise self._gone()
        if len(self._pings) >= _MOST_PINGS:
            raise TransportError(f"{self} has not answered {_MOST_PINGS} pings")
        payload = struct.pack("<Q", next(self._serials))
        answered: asyncio.Future[float] = self._loop.create_future()
        self._pings[payload] = (self._loop.time(), answered)
        try:
            self._queue(self._urgent, encode_control(ControlFrameKind.PING, payload))
            return await asyncio.wait_for(answered, timeout_s)
        except TimeoutError as error:
            raise TransportError(f"{self} did not answer a ping within {timeout_s:g} s") from error
        finally:
            self._pings.pop(payload, None)

    def close(self, why: str, *, flush: bool = False) -> None:
        """Close the connection; with ``flush`` first send the queue, for a fifth of a second at most."""
        if self.closed is not None:
            return
        self.closed = why
        self._drained.set()
        for _, answered in self._pings.values():
            if not answered.done():
                answered.set_exception(self._gone())
        if self._on_closed is not None:
            self._loop.call_soon(self._on_closed, self, why)
        elif not self._opened.done():
            self._opened.set_exception(self._gone())
            self._opened.exception()  # marks the exception as read: nothing may wait for it
        if self._transport is None:
            return
        if flush:
            self._flush = self._loop.call_later(FLUSH_S, self._transport.abort)
            self._pump()
        else:
            self._transport.write(self._session.close_notify())  # leaves only if nothing is before it
            self._transport.abort()

    # What dialling and accepting do with a link.

    @property
    def attached(self) -> bool:
        return self._transport is not None

    async def attach(self, connection: socket.socket) -> None:
        """Take over the connected socket, which is closed with the connection."""
        await self._loop.create_connection(lambda: _Plug(self), sock=connection)
        self._digest()

    async def opened(self) -> None:
        """Wait for OPEN, on the side that was dialled."""
        await self._opened

    def begin(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Give the connection to its owner; the dialling side sends OPEN."""
        if self.closed is not None:
            raise self._gone()
        self._on_message, self._on_closed = on_message, on_closed
        if self.outbound:
            self._opened.set_result(None)
            self._queue(self._waiting, self._opening)
        else:
            self._loop.call_soon(self._release)

    def fail(self, error: BarnraiseError) -> None:
        # Its words only: where it was raised, what the other side sent is still at hand, and would stay.
        self._fault = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        self.close(error.message)

    # Sending.

    def _queue(self, queue: deque[bytes], frame: bytes) -> None:
        if self.closed is not None:
            return
        if self.queued + len(frame) > self._limits.queue:
            self.close("does not read what we send")
            return
        queue.append(frame)
        self._waiting_bytes += len(frame)
        self._pump()

    def _pump(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        while not self._paused and not transport.is_closing() and (piece := self._next_piece()):
            data = self._session.encrypt(piece)
            self._sent_bytes.inc(len(data))
            transport.write(data)
        if self._waiting_bytes <= _DRAINED:
            self._drained.set()
        elif self.closed is None:
            self._drained.clear()
        if self._flush is not None and not self._waiting_bytes and not self._said_all:
            self._said_all = True
            transport.write(self._session.close_notify())
            # We go on reading until the other side has closed too: a reset could overtake our last words.
            transport.write_eof()

    def _next_piece(self) -> memoryview:
        if not self._rest:
            queue = self._urgent or self._waiting
            if not queue:
                return self._rest
            self._rest = memoryview(queue.popleft())
        piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:]
        self._waiting_bytes -= len(piece)
        return piece

    # Receiving.

    def _received(self, data: bytes) -> None:
        if self.closed is not None:
            return
        self.heard_at = self._loop.time()
        self._received_bytes.inc(len(data))
        self._session.feed(data)
        self._digest()

    def _digest(self) -> None:
        try:
            self._read_frames()
        except ProtocolError as error:
            self.fail(ProtocolError(f"{self}: {error.message}", hint=error.hint))
        except ssl.SSLError as error:
            self.fail(self._explain(error))
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._session.outgoing())  # key updates of TLS

    def _read_frames(self) -> None:
        turn = 0
        while self.closed is None and not self._held:
            if turn >= _FRAMES_AT_ONCE:
                self._pause_for_others()
                return
            frame = self._frames.next()
            if frame is not None:
                turn += 1
                self._handle(frame)
                continue
            plain = self._session.decrypt()
            if plain is None:
                return
            if not plain:
                self._end("the other side closed the link")
                return
            self._frames.feed(plain)

    def _pause_for_others(self) -> None:
        """Yield to the loop, so that many small messages do not delay other connections' heartbeats."""
        self._held = True
        if self._transport is not None:
            self._transport.pause_reading()
        self._loop.call_soon(self._release)

    def _handle(self, frame: ControlFrame) -> None:
        if frame.kind is ControlFrameKind.PING:
            self._queue(self._urgent, encode_control(ControlFrameKind.PONG, frame.payload))
        elif frame.kind is ControlFrameKind.PONG:
            sent, answered = self._pings.pop(frame.payload, (0.0, None))
            if answered is not None and not answered.done():
                answered.set_result(self._loop.time() - sent)
        elif frame.kind is ControlFrameKind.OPEN:
            self._open(frame)
        elif self._on_message is None:
            raise ProtocolError("a message came before the link was open")
        else:
            self._hand_over(self._on_message, frame.payload)

    def _open(self, frame: ControlFrame) -> None:
        if self.outbound or self._opened.done():
            raise ProtocolError("a link was opened twice")
        if encode_control(ControlFrameKind.OPEN, frame.payload) != self._opening:
            raise ProtocolError("the two sides understood different prefaces")
        self._opened.set_result(None)
        self._held = True
        if self._transport is not None:
            self._transport.pause_reading()

    def _release(self) -> None:
        self._held = False
        if self.closed is None and self._transport is not None:
            self._transport.resume_reading()
            self._digest()

    def _hand_over(self, on_message: OnMessage, payload: bytes) -> None:
        try:
            on_message(self, payload)
        except BarnraiseError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001  # our own fault; the other side must see an end, not silence
            _log.exception("a message from %s could not be handled", self)
            self.close(f"our side failed at a message: {type(error).__name__}")

    # The end.

    def _explain(self, error: ssl.SSLError) -> BarnraiseError:
        if self._opened.done():
            return ProtocolError(f"{self} sent bytes that its TLS does not allow")
        explained = explain(error)
        return HandshakeError(f"{self}: {explained.message}", hint=explained.hint)

    def _gone(self) -> BarnraiseError:
        if self._fault is not None:
            return self._fault
        return TransportError(f"{self} is not connected: {self.closed}")

    def _end(self, why: str) -> None:
        if self.closed is None and not self._opened.done():
            if self.outbound:
                self._fault = HandshakeError(f"{self} ended the handshake: {why}")
            else:  # not an error if it dialled several addresses
                self._fault = TransportError(f"{self} disconnected before it opened the link: {why}")
        self.close(why)

    def _lost(self, error: Exception | None) -> None:
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            self._end("the connection was reset")
        else:
            self._end(f"the connection broke ({error})" if error else "the connection has ended")
        if self._flush is not None:
            self._flush.cancel()
        self._transport = None


class _Plug(asyncio.Protocol):
    """Adapter between a connection and asyncio's transport."""

    def __init__(self, link: ControlConnection) -> None:
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        stream.set_write_buffer_limits(high=_PIECE, low=_PIECE // 4)
        self._link._transport = stream

    def data_received(self, data: bytes) -> None:
        self._link._received(data)

    def eof_received(self) -> None:
        self._link._end("the other side ended the connection without a goodbye")

    def connection_lost(self, exc: Exception | None) -> None:
        self._link._lost(exc)

    def pause_writing(self) -> None:
        self._link._paused = True

    def resume_writing(self) -> None:
        self._link._paused = False
        # Not from within the transport's own sending: if that fails, asyncio ends the connection twice.
        self._link._loop.call_soon(self._link._pump)
