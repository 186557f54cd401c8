"""The hub's door: so many connections at once, so many of one address, and a word for those who are too many.

Connections count from the moment they are accepted, before anything was said on them. Beyond a limit some are
still let in, to be told when to come again; beyond that they are closed without a word. Whoever comes from
this machine itself is not counted by address: that may be a proxy, behind which is everybody.
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
_TOLD_OF_ONE, _TOLD = 4, 64  # who are too many, and are let in to be told so
_PAUSE_S, _SHOWN_S = 0.5, 60.0  # after the system refused to accept
_MOST_FILES = 65_536
_MOST_FILES_MACOS = 10_240  # the most there, whatever the hard limit says
_RESERVED_FILES = 128  # for the log, libraries, uploads
Verdict = Literal["in", "crowded", "full", "out"]
Respond = Callable[[Mapping[str, str], HubRefused], Response]  # from the headers of the request


class ConnectionLimiter:
    """Who is in. Pure."""

    def __init__(self, most: int, of_one: int | None = None) -> None:
        # A school may be behind one address; still, no address alone takes all places.
        self.most = most
        self.of_one = of_one or max(most // 8, min(256, -(-most // 2)))
        self._here: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    def enter(self, address: str) -> Verdict:
        """``crowded`` and ``full`` are let in to hear that; all but ``out`` must `leave`."""
        place = source_of(address)
        verdict: Verdict = "in"
        if self._here.total() >= self.most:
            verdict = "full"
        elif place and self._here[place] >= self.of_one:
            verdict = "crowded"
        if verdict == "in":
            self._here[place] += 1
        elif self._told.total() >= _TOLD or (place and self._told[place] >= _TOLD_OF_ONE):
            return "out"
        else:
            self._told[place] += 1
        return verdict

    def leave(self, address: str, verdict: Verdict) -> None:
        counts, place = self._here if verdict == "in" else self._told, source_of(address)
        counts[place] -= 1
        if not counts[place]:
            del counts[place]

    @property
    def is_roomy(self) -> bool:
        return self._here.total() < 0.9 * self.most


def source_of(address: str) -> str:
    """Whom an address belongs to: a home has 2^64 of IPv6's. Empty for this machine itself."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback:
        return ""
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


class SlowClientProtocol(H11Protocol):
    """h11, whatever else is installed; and whoever connects, or begins a request, asks for something soon,
    and takes what it asked for."""

    is_made = False
    on_lost: Callable[[], None] | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.is_made = True
        self._late = self.loop.call_later(_FIRST_REQUEST_S, self._give_up)

    def data_received(self, data: bytes) -> None:
        """uvicorn's own clock stops at any byte: a request that is begun and never ended would stay.

        One byte after the other gets no more time than silence.
        """
        super().data_received(data)
        if self._is_asked:
            self._late.cancel()
        elif self._late.cancelled():
            self._late = self.loop.call_later(_FIRST_REQUEST_S, self._give_up)

    @property
    def _is_asked(self) -> bool:
        """Before the first request there is no cycle; after the last it is complete."""
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

    def _give_up(self) -> None:
        if not self._is_asked:
            self.transport.close()

    def pause_writing(self) -> None:
        """uvicorn waits for a reader without end."""
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
    """uvicorn, with a door of our own. For sockets that listen."""

    def __init__(
        self,
        config: uvicorn.Config,
        doors: ConnectionLimiter,
        troubles: HealthStatus,
        respond: Respond,
    ) -> None:
        super().__init__(config)
        self._doors, self._troubles, self._respond = doors, troubles, respond
        self._accepting: list[asyncio.Task[None]] = []
        self._welcoming: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._accepting = [asyncio.create_task(self._accept(one)) for one in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (*self._accepting, *self._welcoming):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._welcoming, return_exceptions=True)
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
                self._troubles.tell("accepting", HealthWarning(words, _FEWER, until))
                await asyncio.sleep(_PAUSE_S)
                continue
            verdict = self._doors.enter(str(peer[0]))
            self._tell(verdict)
            if verdict == "out":
                line.close()
            else:
                task = asyncio.create_task(self._welcome(line, str(peer[0]), verdict))
                self._welcoming.add(task)
                task.add_done_callback(self._welcoming.discard)
            await asyncio.sleep(0)  # whoever connects without end keeps nobody else waiting

    async def _welcome(self, line: socket.socket, address: str, verdict: Verdict) -> None:
        protocol = SlowClientProtocol(self.config, self.server_state, self.lifespan.state)
        if verdict != "in":
            protocol.app = self._telling(verdict)
        protocol.on_lost = lambda: self._doors.leave(address, verdict)
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
                self._doors.leave(address, verdict)

    def _tell(self, verdict: Verdict) -> None:
        if verdict == "full":
            words = f"all {self._doors.most} connections that this hub may have are taken"
            self._troubles.tell("connections", HealthWarning(words, _FEWER))
        elif self._doors.is_roomy:
            self._troubles.over("connections", "there is room for connections again")

    def _telling(self, verdict: Verdict) -> ASGIApp:
        error = _FULL if verdict == "full" else _crowded(self._doors.of_one)

        async def tell(scope: Scope, receive: Receive, send: Send) -> None:
            answer = self._respond(Request(scope).headers, error)
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)

        return tell


_FEWER = (
    "Members come again by themselves. If it lasts, let fewer come to this hub directly (`barnraise hub up "
    "--parent` makes a region of its own), or allow its process more open files (`ulimit -n`)."
)
_FULL = HubRefused(
    503, "busy", "the hub has as many connections as it can have", hint="Try again later.", retry_s=10.0
)


def _crowded(most: int) -> HubRefused:
    said = f"{most} connections came from this address, more are not possible at once"
    return HubRefused(429, "rate", said, hint="Close some of them, or try again later.", retry_s=10.0)


def raise_file_limit() -> int | None:
    """To the hard limit, as far as it is of any use: soft ones are low by tradition. None: there is none."""
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


def connections_within(files: int | None, most: int) -> int:
    """So many at once leave room for all else: each may read a blob at the same time."""
    return most if files is None else max(1, min(most, (files - _RESERVED_FILES) // 2))
