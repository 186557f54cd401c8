"""Finder of last resort: UDP broadcast on the discovery port, for networks that drop multicast."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Callable

import psutil

from barnraise.core.flow.backoff import Backoff
from barnraise.core.flow.events import Wakeup
from barnraise.core.flow.rate_limit import RateLimit
from barnraise.core.flow.supervised_task import cancel_task
from barnraise.discovery.datagrams import Datagram, decode_datagram, encode_datagram
from barnraise.discovery.finder import OnSighting, Sighting, is_dialable, only_loopback
from barnraise.discovery.search_schedule import SearchSchedule
from barnraise.transport.addresses import interface_states, own_addresses, source_of

_LIMITED_BROADCAST = "255.255.255.255"
_PATIENCE_S = 5.0
_BACKOFF = Backoff(5.0, 60.0)
_FORGET_S = 90.0
_RETRY_S = 30.0
_ANSWERS_PER_SOURCE = 1.0
_ANSWERS_IN_TOTAL = 20.0

_log = logging.getLogger(__name__)


def broadcast_addresses() -> list[str]:
    """Return the broadcast address of each IPv4 network of this machine."""
    is_up = interface_states()
    addresses = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if is_up(name) and entry.family == socket.AF_INET and entry.netmask:
                network = ipaddress.ip_interface(f"{entry.address}/{entry.netmask}").network
                # Networks of one or two addresses are tunnels, which have no broadcast.
                if not network.is_loopback and network.prefixlen <= 30:
                    addresses.append(str(network.broadcast_address))
    return list(dict.fromkeys(addresses)) or [_LIMITED_BROADCAST]


class BroadcastFinder:
    """Finder that sends queries by UDP broadcast, only for tags without a recent sighting.

    It answers only for tags that this machine advertises.
    """

    name = "broadcast"
    finds_strangers = True

    def __init__(
        self,
        port: int,
        *,
        targets: Callable[[], list[str]] = broadcast_addresses,
        addresses: Callable[[], list[str]] = own_addresses,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._discovery_port = port
        self._targets = targets
        self._addresses = addresses
        self._searches = SearchSchedule(_BACKOFF, patience_s=patience_s, forget_s=_FORGET_S)
        self._answers = RateLimit(
            _ANSWERS_PER_SOURCE, 4.0, in_total=_ANSWERS_IN_TOTAL, total_burst=16.0, max_sources=256
        )
        self._wakeup = Wakeup()
        self._task: asyncio.Task[None] | None = None
        self._on_sighting: OnSighting | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self._socket: socket.socket | None = None
        self._tags: frozenset[str] = frozenset()
        self._watched: frozenset[str] = frozenset()
        self._port = 0
        self._loopback = False
        self._trouble: str | None = None

    async def start(self, on_sighting: OnSighting) -> None:
        self._on_sighting = on_sighting
        await self._open()
        self._task = asyncio.create_task(self._keep(), name="discovery broadcast")

    def advertise(self, tags: frozenset[str], port: int) -> None:
        self._tags, self._port = tags, port

    def watch(self, tags: frozenset[str]) -> None:
        self._watched = tags
        self._searches.want(tags, time.monotonic())
        self._wakeup.wake()

    def refresh(self) -> None:
        self._searches.restart(time.monotonic())
        self._wakeup.wake()

    def seen(self, tag: str) -> None:
        self._searches.seen(tag, time.monotonic())

    async def stop(self) -> None:
        await cancel_task(self._task)
        self._task = None
        self._close()

    def health(self) -> str | None:
        return self._trouble

    async def _keep(self) -> None:
        while True:
            now = time.monotonic()
            if self._transport is None or self._transport.is_closing():
                await self._open()
            if self._transport is None:
                await self._wakeup.sleep(_RETRY_S)
                continue
            if due := self._searches.due(now):
                try:
                    self._ask(due)
                except Exception as error:  # noqa: BLE001 - a strange interface must not end the search
                    self._trouble = f"the networks of this machine cannot be listed: {error}"
            next_at = self._searches.next_at()
            await self._wakeup.sleep(_RETRY_S if next_at is None else max(0.05, next_at - now))

    async def _open(self) -> None:
        try:
            self._loopback = only_loopback(self._addresses())
            self._socket = _open_socket(self._discovery_port)
            self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: _Protocol(self._received), sock=self._socket
            )
        except OSError as error:
            self._close()
            self._trouble = _explain(error, self._discovery_port)
            _log.debug("broadcast does not work now: %s", error)
        else:
            self._trouble = None

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        elif self._socket is not None:
            self._socket.close()
        self._transport = self._socket = None

    def _ask(self, tags: list[str]) -> None:
        self._loopback = only_loopback(self._addresses())
        targets = self._targets()
        last: OSError | None = None
        reached = False
        for tag in tags:
            port = self._port if tag in self._tags else 0
            data = encode_datagram(Datagram("question", tag, port))
            for target in targets:
                try:
                    self._send(data, (target, self._discovery_port))
                    reached = True
                except OSError as error:
                    last = error
        failed = last is not None and not reached
        self._trouble = f"no network accepts broadcasts: {last}" if failed else None

    def _received(self, data: bytes, sender: tuple[str, int]) -> None:
        datagram = decode_datagram(data)
        if datagram is None:
            return
        host = sender[0]
        if datagram.kind == "question" and datagram.tag in self._tags:
            self._answer(datagram.tag, sender)
        if not datagram.port or datagram.tag not in self._watched or self._on_sighting is None:
            return
        if is_dialable(host, loopback=self._loopback):
            self._on_sighting(Sighting(host, datagram.port, datagram.tag, self.name))

    def _answer(self, tag: str, sender: tuple[str, int]) -> None:
        if not self._answers.allows(source_of(sender[0]), time.monotonic()):
            return
        try:
            self._send(encode_datagram(Datagram("answer", tag, self._port)), sender)
        except OSError as error:
            _log.debug("no answer could be sent to %s: %s", sender[0], error)

    def _send(self, data: bytes, target: tuple[str, int]) -> None:
        # Not through the transport: it would hide which target failed.
        if self._socket is not None:
            self._socket.sendto(data, target)


class _Protocol(asyncio.DatagramProtocol):
    def __init__(self, received: Callable[[bytes, tuple[str, int]], None]) -> None:
        self._received = received

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._received(data, addr)

    def error_received(self, exc: Exception) -> None:
        """Ignore errors of single receivers, which a broadcast cannot miss."""


def _open_socket(port: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        # Two agents of one user may share the port, and both hear a broadcast; on Windows this option would
        # let any program take the port away.
        if hasattr(socket, "SO_REUSEPORT"):
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        opened.setblocking(False)
        opened.bind(("0.0.0.0", port))
    except OSError:
        opened.close()
        raise
    return opened


def _explain(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"UDP port {port} is taken by another program: free it, or set network.discovery_port"
    return f"UDP port {port} cannot be opened: {error.strerror or error}"
