"""The port behind which every way to find machines stands, and what such a way reports. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# A place that was named by a person or remembered: nobody showed a tag there yet.
UNTAGGED = ""


@dataclass(frozen=True)
class Sighting:
    """Somebody who shows this tag can be dialled there. It proves nothing: only the handshake does."""

    address: str
    port: int
    tag: str
    source: str


OnSighting = Callable[[Sighting], None]


class Finder(Protocol):
    """One way to find machines and to be found. All methods are called on the event loop's thread."""

    @property
    def name(self) -> str:
        """Short, for logs and ``Sighting.source``."""

    @property
    def finds_strangers(self) -> bool:
        """Whether it finds machines of which nothing is known yet."""

    async def start(self, on_sighting: OnSighting) -> None:
        """Begin, without raising: what does not work now is tried again and shown by ``health``."""

    def advertise(self, tags: frozenset[str], port: int) -> None:
        """The tags under which we can be found from now on, at this port."""

    def watch(self, tags: frozenset[str]) -> None:
        """The tags that we look for from now on."""

    def refresh(self) -> None:
        """Look again now."""

    def seen(self, tag: str) -> None:
        """Some finder just saw another machine with this tag, so that a last resort may rest."""

    async def stop(self) -> None:
        """Say goodbye and end; safe to repeat."""

    def health(self) -> str | None:
        """None if it works, else a sentence that says why not."""


def is_dialable(address: str, *, loopback: bool = False) -> bool:
    """Whether an address from the network may be dialled.

    Our own loopback is nobody else's address, so it counts only on a machine that has nothing else. A
    link-local IPv6 address needs an interface name that only its sender knows.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if parsed.is_loopback:
        return loopback
    if parsed.is_unspecified or parsed.is_multicast or (parsed.version == 4 and parsed.is_reserved):
        return False
    return not (isinstance(parsed, ipaddress.IPv6Address) and (parsed.is_link_local or parsed.ipv4_mapped))


def only_loopback(addresses: list[str]) -> bool:
    """Whether a machine has no address that another machine could dial."""
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)
