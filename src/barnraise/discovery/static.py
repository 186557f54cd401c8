"""Finder of machines that the settings name, for networks where nothing else works."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from barnraise.core.errors import ConfigError
from barnraise.core.flow.backoff import Backoff
from barnraise.discovery.finder import UNTAGGED, OnSighting
from barnraise.discovery.known_addresses import KnownAddressFinder

_BACKOFF = Backoff(5.0, 60.0)
_RESOLVE_S = 5.0
_MOST_PEERS = 256
_MOST_ADDRESSES = 8
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


class StaticFinder(KnownAddressFinder):
    """Finder that reports the configured peers, with backoff, and resolves their names each time."""

    def __init__(self, peers: Sequence[str], default_port: int, *, resolve: Resolve | None = None) -> None:
        if len(peers) > _MOST_PEERS:
            raise ConfigError(f"network.peers has {len(peers)} entries, more than {_MOST_PEERS}")
        super().__init__("static", _BACKOFF)
        self._peers = tuple(dict.fromkeys(parse_peer(peer, default_port) for peer in peers))
        self._resolve = resolve or _resolve
        self._unresolved: dict[str, str] = {}
        self._pending: set[str] = set()

    async def start(self, on_sighting: OnSighting) -> None:
        if self._peers:
            await super().start(on_sighting)

    def watch(self, tags: frozenset[str]) -> None:
        # All peers are one search: any of them may be the machine that is searched.
        self._search(frozenset({UNTAGGED}) if tags else frozenset())

    def health(self) -> str | None:
        if not self._unresolved:
            return None
        names = ", ".join(f"{host} ({why})" for host, why in sorted(self._unresolved.items()))
        return f"names in network.peers that do not resolve: {names}"

    async def _report_due(self, keys: list[str]) -> None:
        await asyncio.gather(*(self._report_peer(peer) for peer in self._peers))

    async def _report_peer(self, peer: StaticPeer) -> None:
        self._report([peer.host] if peer.literal else await self._lookup(peer.host), peer.port)

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
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


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
