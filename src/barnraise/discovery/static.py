"""Finder of machines that the settings name, for networks where nothing else works."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from barnraise.core.errors import ConfigError
from barnraise.core.flow.backoff import Backoff
from barnraise.core.flow.events import Wakeup
from barnraise.core.flow.supervised_task import cancel_task
from barnraise.discovery.finder import UNTAGGED, OnSighting, Sighting
from barnraise.discovery.search_schedule import SearchSchedule

_BACKOFF = Backoff(5.0, 60.0)
_RESOLVE_S = 5.0
_MOST_PEERS = 256
_MOST_ADDRESSES = 8
_IDLE_S = 3600.0
# What Debian writes into /etc/hosts for a machine's own name: never the way to another machine.
_OWN_NAME_ADDRESS = "127.0.1.1"

Resolve = Callable[[str], list[str]]


@dataclass(frozen=True)
class StaticPeer:
    """Host name or address, and a port."""

    host: str
    port: int

    @property
    def literal(self) -> bool:
        """Return True if the host is an address already."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


def parse_peer(text: str, default_port: int) -> StaticPeer:
    """Parse ``host``, ``host:port``, ``192.0.2.7``, ``2001:db8::7`` or ``[2001:db8::7]:52416``."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, bracket, rest = host[1:].partition("]")
        port = rest.removeprefix(":")
        if not bracket or (rest and not rest.startswith(":")):
            raise _wrong(text)
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
        if not port:
            raise _wrong(text)
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise _wrong(text) from error
    if host == _OWN_NAME_ADDRESS:
        raise ConfigError(
            f"network.peers has {text!r}, which is this machine's name for itself",
            hint="Write the address that the other machine shows in `barnraise status`.",
        )
    if not host or len(host) > 253 or not host.isprintable() or any(sign in host for sign in " /@"):
        raise _wrong(text)
    if port and not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        raise _wrong(text)
    return StaticPeer(host, int(port) if port else default_port)


class StaticFinder:
    """Finder that reports the configured peers, with backoff, and resolves their names each time."""

    name = "static"
    finds_strangers = False

    def __init__(self, peers: Sequence[str], default_port: int, *, resolve: Resolve | None = None) -> None:
        if len(peers) > _MOST_PEERS:
            raise ConfigError(f"network.peers has {len(peers)} entries, more than {_MOST_PEERS}")
        self._peers = tuple(dict.fromkeys(parse_peer(peer, default_port) for peer in peers))
        self._resolve = resolve or _resolve
        self._searches = SearchSchedule(_BACKOFF)
        self._wakeup = Wakeup()
        self._task: asyncio.Task[None] | None = None
        self._on_sighting: OnSighting | None = None
        self._unresolved: dict[str, str] = {}
        self._pending: set[str] = set()

    async def start(self, on_sighting: OnSighting) -> None:
        self._on_sighting = on_sighting
        if self._peers:
            self._task = asyncio.create_task(self._keep(), name="discovery static")

    def advertise(self, tags: frozenset[str], port: int) -> None:
        """Do nothing: other machines have settings of their own."""

    def watch(self, tags: frozenset[str]) -> None:
        # All peers are one search: any of them may be the machine that is searched.
        self._searches.want(frozenset({UNTAGGED}) if tags else frozenset(), time.monotonic())
        self._wakeup.wake()

    def refresh(self) -> None:
        self._searches.restart(time.monotonic())
        self._wakeup.wake()

    def seen(self, tag: str) -> None:
        """Do nothing: each configured peer may be another machine."""

    async def stop(self) -> None:
        await cancel_task(self._task)
        self._task = None

    def health(self) -> str | None:
        if not self._unresolved:
            return None
        names = ", ".join(f"{host} ({why})" for host, why in sorted(self._unresolved.items()))
        return f"names in network.peers that do not resolve: {names}"

    async def _keep(self) -> None:
        while True:
            if self._searches.due(time.monotonic()):
                await asyncio.gather(*(self._report(peer) for peer in self._peers))
            next_at = self._searches.next_at()
            await self._wakeup.sleep(_IDLE_S if next_at is None else next_at - time.monotonic())

    async def _report(self, peer: StaticPeer) -> None:
        addresses = [peer.host] if peer.literal else await self._lookup(peer.host)
        if self._on_sighting is not None:
            for address in addresses:
                self._on_sighting(Sighting(address, peer.port, UNTAGGED, self.name))

    async def _lookup(self, host: str) -> list[str]:
        """Resolve a name on a daemon thread.

        A shared thread would keep this process alive while a resolver hangs.
        """
        if host in self._pending:
            return []
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str] | str] = loop.create_future()
        self._pending.add(host)

        def deliver(result: list[str] | str) -> None:
            self._pending.discard(host)
            if not answer.done():
                answer.set_result(result)

        def work() -> None:
            try:
                result: list[str] | str = self._resolve(host)
            except (OSError, UnicodeError) as error:
                result = getattr(error, "strerror", None) or str(error)
            try:
                loop.call_soon_threadsafe(deliver, result)
            except RuntimeError:
                pass  # the loop ended while the resolver hung

        threading.Thread(target=work, name=f"resolve {host}", daemon=True).start()
        try:
            async with asyncio.timeout(_RESOLVE_S):
                result = await answer
        except TimeoutError:
            result = f"no answer from the resolver within {_RESOLVE_S:g} s"
        if isinstance(result, str):
            self._unresolved[host] = result
            return []
        usable = [address for address in result if host == "localhost" or not _is_loopback(address)]
        if usable:
            self._unresolved.pop(host, None)
        else:
            self._unresolved[host] = "only this machine's own loopback"
        return usable[:_MOST_ADDRESSES]


def _resolve(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return True


def _wrong(text: str) -> ConfigError:
    return ConfigError(
        f"network.peers has {text!r}, which does not name a machine",
        hint="Write a host or address, with a port if it is not the usual one: nas.lan or 192.0.2.7:52416.",
    )
