"""Connection limits: total and per address; excess clients get 503 or 429.

A connection counts from the moment it is accepted. Beyond a limit, a few clients are still accepted to
receive the error; any more are closed at once. Connections from localhost are exempt from the per-address
limit, because they may come from a reverse proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from barnraise.core.errors import HubRefused
from barnraise.hub.server.health import HealthStatus, HealthWarning

logger = logging.getLogger(__name__)
MOST = 8192
_FIRST_REQUEST_S = 30.0
_HANDSHAKE_S = 20.0
_UNREAD_S = 120.0  # as long as a member has for a piece; a kernel tells of slow readers only now and then
_REJECTED_PER_SOURCE, _REJECTED = 4, 64  # excess clients that still get an error response
_PAUSE_S, _SHOWN_S = 0.5, 60.0  # after the system refused to accept
_MOST_FILES = 65_536
_MOST_FILES_MACOS = 10_240  # the limit of macOS, even if the hard limit is higher
_RESERVED_FILES = 128  # for the log, libraries, uploads
Verdict = Literal["in", "crowded", "full", "out"]
Respond = Callable[[Mapping[str, str], HubRefused], Response]  # from the headers of the request


class ConnectionLimiter:
    """Counts of open connections, in total and per source. Pure."""

    def __init__(self, max_connections: int, of_one: int | None = None) -> None:
        # A school may be behind one address; still, no address alone takes all places.
        self.max_connections = max_connections
        self.of_one = of_one or max(max_connections // 8, min(256, -(-max_connections // 2)))
        self._accepted: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def admit(self, address: str) -> Verdict:
        """Decide about a new connection.

        ``crowded`` and ``full`` get an error response. Call `release` after all verdicts but ``out``.
        """
        place = source_of(address)
        verdict: Verdict = "in"
        if self._accepted.total() >= self.max_connections:
            verdict = "full"
        elif place and self._accepted[place] >= self.of_one:
            verdict = "crowded"
        if verdict == "in":
            self._accepted[place] += 1
        elif self._rejected.total() >= _REJECTED or (place and self._rejected[place] >= _REJECTED_PER_SOURCE):
            return "out"
        else:
            self._rejected[place] += 1
        return verdict

    def release(self, address: str, verdict: Verdict) -> None:
        """Forget a closed connection that got this verdict."""
        counts, place = self._accepted if verdict == "in" else self._rejected, source_of(address)
        counts[place] -= 1
        if not counts[place]:
            del counts[place]

    @property
    def has_room(self) -> bool:
        """Tell whether fewer than 90 % of all connections are taken."""
        return self._accepted.total() < 0.9 * self.max_connections


def source_of(address: str) -> str:
    """Return the source that an address counts for: the address itself, or its /64 network for IPv6.

    Empty for this machine.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return ""
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


class SlowClientProtocol(H11Protocol):
    """HTTP/1.1 protocol that closes slow clients.

    A client must send a complete request soon after it connects or starts one, and must read its response.
    """

    is_made = False
    on_lost: Callable[[], None] | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.is_made = True
        self._late = self.loop.call_later(_FIRST_REQUEST_S, self._give_up)

    def data_received(self, data: bytes) -> None:
        """Restart the request timer.

        uvicorn stops its own timer at any byte, so an unfinished request would stay open. Single bytes do not
        extend the time.
        """
        super().data_received(data)
        if self._is_asked:
            self._late.cancel()
        elif self._late.cancelled():
            self._late = self.loop.call_later(_FIRST_REQUEST_S, self._give_up)

    @property
    def _is_asked(self) -> bool:
        """Return True while a request is being handled.

        There is no cycle before the first request, and it is complete after the last.
        """
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

    def _give_up(self) -> None:
        if not self._is_asked:
            self.transport.close()

    def pause_writing(self) -> None:
        """Start a timer for the reader, because uvicorn would wait without limit."""
        super().pause_writing()
        self._forget_unread()
        self._unread = self.loop.call_later(_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        self._forget_unread()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()


class LimitedServer(uvicorn.Server):
    """uvicorn server that accepts connections through a `ConnectionLimiter`.

    Its sockets must listen already.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        doors: ConnectionLimiter,
        troubles: HealthStatus,
        respond: Respond,
    ) -> None:
        super().__init__(config)
        self._limiter, self._health, self._respond = doors, troubles, respond
        self._accepting: list[asyncio.Task[None]] = []
        self._handling: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (*self._accepting, *self._handling):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._handling, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                line, peer = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue  # it has left again; only some systems tell
            except OSError as error:  # no more files, or no more memory
                until = loop.time() + _SHOWN_S
                words = f"connections cannot be accepted: {error.strerror or error}"
                self._health.warn("accepting", HealthWarning(words, _FEWER, until))
                await asyncio.sleep(_PAUSE_S)
                continue
            verdict = self._limiter.admit(str(peer[0]))
            self._report(verdict)
            if verdict == "out":
                line.close()
            else:
                task = asyncio.create_task(self._handle(line, str(peer[0]), verdict))
                self._handling.add(task)
                task.add_done_callback(self._handling.discard)
            await asyncio.sleep(0)  # other tasks run although connections keep arriving

    async def _handle(self, line: socket.socket, address: str, verdict: Verdict) -> None:
        protocol = SlowClientProtocol(self.config, self.server_state, self.lifespan.state)
        if verdict != "in":
            protocol.app = self._rejection(verdict)
        protocol.on_lost = lambda: self._limiter.release(address, verdict)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                line,
                ssl=self.config.ssl,
                ssl_handshake_timeout=_HANDSHAKE_S if self.config.ssl else None,
            )
        except OSError:  # its handshake failed or took too long
            pass
        finally:
            if not protocol.is_made:
                self._limiter.release(address, verdict)

    def _report(self, verdict: Verdict) -> None:
        if verdict == "full":
            words = f"all {self._limiter.max_connections} connections of this hub are in use"
            self._health.warn("connections", HealthWarning(words, _FEWER))
        elif self._limiter.has_room:
            self._health.resolve("connections", "the hub accepts connections again")

    def _rejection(self, verdict: Verdict) -> ASGIApp:
        error = _FULL if verdict == "full" else _crowded(self._limiter.of_one)

        async def tell(scope: Scope, receive: Receive, send: Send) -> None:
            answer = self._respond(Request(scope).headers, error)
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)

        return tell


_FEWER = (
    "Members retry automatically. If it lasts, move some of them to a regional hub (`barnraise hub up "
    "--parent`), or raise the limit of open files (`ulimit -n`)."
)
_FULL = HubRefused(503, "busy", "the hub has no free connections", hint="Try again later.", retry_s=10.0)


def _crowded(max_connections: int) -> HubRefused:
    message = f"this address already has {max_connections} connections, which is the limit"
    return HubRefused(429, "rate", message, hint="Close some of them, or try again later.", retry_s=10.0)


def raise_file_limit() -> int | None:
    """Raise the limit of open files to the hard limit, or to what is useful.

    Return the new limit; None if there is none.
    """
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    for wanted in (_MOST_FILES if hard == unlimited else min(hard, _MOST_FILES), _MOST_FILES_MACOS):
        if soft == unlimited or soft >= wanted:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return None if soft == unlimited else soft


def connections_within(files: int | None, max_connections: int) -> int:
    """Return the number of connections that leave enough open files for other uses.

    Each connection may read a blob at the same time.
    """
    return max_connections if files is None else max(1, min(max_connections, (files - _RESERVED_FILES) // 2))
